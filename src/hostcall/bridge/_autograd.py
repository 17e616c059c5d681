"""`hc.bridge.autograd`: a function written with autograd.numpy."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from hostcall._core.errors import wrong
from hostcall._core.mistakes import check_function
from hostcall._core.source import look
from hostcall._host_function.trees import pick, spread
from hostcall.bridge._library import (
    Arrays,
    Code,
    Flags,
    LibraryFunction,
    Run,
    TakesNoRules,
    along,
    check_derivatives,
    is_array,
    needed,
)

tree = jax.tree_util

# Cotangents of the results -> those of what moves.
Pull: TypeAlias = Callable[[Arrays], Arrays]
Graph: TypeAlias = tuple[Pull, list[bool]]


def of_autograd(
    fn: Callable[..., Any] | None = None,
    *,
    result: Any = "infer",
    derivatives: int = 1,
    vmap_method: str | None = None,
    timeout: float | None = None,
    executor: Any = None,
    name: str | None = None,
) -> Any:
    """Makes a host function from one written with HIPS autograd's NumPy.

    Autograd gives its derivatives::

        import autograd.numpy as anp

        @hc.bridge.autograd
        def energy(q, k):
            return anp.sum(k * anp.sin(q) ** 2)

        jax.jit(jax.grad(energy))(q, k)

    Args:
        fn: a pure function of arrays and pytrees of them, written with autograd.numpy
            and autograd.scipy; leaves that aren't arrays reach it as they are. Without
            it, `autograd` returns a decorator.
        result: as in `hc.host`; by default "infer", from a run on zeros for each new
            set of shapes.
        derivatives: how many times it can be differentiated. Autograd differentiates
            its own derivatives, so any number works. With 1, the graph of the forward
            pass waits on the host for the backward pass; with more, the backward pass
            makes it again.
        vmap_method: "sequential" (default) or "parallel": autograd has no batches.
        timeout: as in `hc.host`.
        executor: as in `hc.host`.
        name: as in `hc.host`.

    Returns:
        A `HostFunction`. Keyword arguments are put into their positions.

    Raises:
        PackageError: autograd is not installed.
        SpecError: an argument or option is wrong.
        DerivativeError: it is differentiated more than `derivatives` times, when the
            program is traced or lowered.
        What `fn` raises, as `hc.call`.

    Under transformations:
        jit, scan, while_loop, cond, remat, shard_map: as a pure `hc.call`.
        vmap: row by row, derivatives too.
        jvp, jacfwd: `autograd.make_jvp`, one call for value and tangent. If autograd
            lacks a forward rule, its error comes when the program runs.
        grad, vjp, jacrev: `autograd.make_vjp`. The forward call leaves its graph on the
            host, as `hc.host` keeps residuals; the backward call runs it.
        hessian and higher orders: with derivatives=2 and more, in any mixture.

    Cost: a host call, and autograd's own cost: some microseconds for each operation of
    `fn`.

    Source: autograd's tutorial; its convention for complex derivatives is JAX's.
    """
    options = {k: v for k, v in dict(locals()).items() if k != "fn"}
    if fn is None:
        return functools.partial(of_autograd, **options)
    shown = name or check_function(fn, "hc.bridge.autograd(fn)").name
    needed("autograd", "autograd")
    options["advice"] = check_derivatives("autograd", shown, derivatives)
    if vmap_method not in (None, "sequential", "parallel"):
        why = ": autograd differentiates one row at a time"
        wanted = "'sequential' or 'parallel'"
        raise wrong("vmap_method", f"`{shown}`", wanted, vmap_method, why)
    make_thread_safe()
    return OfAutograd(FromAutograd(fn, shown, look(fn).source, fn), **options)


class OfAutograd(TakesNoRules, LibraryFunction):
    """A function of autograd's NumPy. `hc.bridge.autograd` makes it."""


@functools.cache
def make_thread_safe() -> None:
    """Gives each thread its own count of nested traces.

    Autograd has one count for the process. If two threads trace at once, one confuses
    an inner variable with an outer one, and its derivative is silently wrong.
    """
    from autograd import tracer

    class PerThread(threading.local):
        top = -1
        new_trace = tracer.TraceStack.new_trace

    tracer.trace_stack = PerThread()


class FromAutograd(Code):
    """A function of autograd's NumPy: the user's, or a derivative of one."""

    leaves = staticmethod(tree.tree_leaves)

    @staticmethod
    def is_array(leaf: object) -> bool:
        """Whether it is an array that the call hands over, or a variable for one."""
        from autograd.tracer import getval

        return is_array(getval(leaf))

    @staticmethod
    def vjp(f: Run, *xs: object) -> tuple[Arrays, Pull]:
        from autograd import make_vjp
        from autograd.tracer import getval

        pull, found = make_vjp(_traced(f))(xs)
        zero = np.zeros_like(getval(xs[0]))
        return found[:-1], lambda cotangents: list(pull((*cotangents, zero)))

    @staticmethod
    def jvp(f: Run, xs: Arrays, dots: Arrays) -> tuple[Arrays, Arrays]:
        from autograd import make_jvp

        moving, whole = _split(f)
        found, touts = make_jvp(_traced(moving))(xs)(dots)
        return whole(found), whole(touts)

    def __call__(self, *args: object) -> object:
        return self.run(*args)

    def forward(self, args: Arrays, _: object) -> tuple[object, Graph]:
        marks = [moves(x) for x in tree.tree_leaves(args) if is_array(x)]
        arrays, filled, _ = along(args, marks, is_array)
        treedef = None

        def function(*arrays: object) -> Any:
            nonlocal treedef
            outs, treedef = tree.tree_flatten(self.run(*filled(arrays)))
            return outs

        moving, whole = _split(function)
        found, pull = self.vjp(moving, *arrays)
        assert treedef is not None
        return treedef.unflatten(whole(found)), (pull, marks)

    @staticmethod
    def backward(graph: Graph, cotangents: Arrays, wanted: Flags) -> Arrays:
        pull, marks = graph
        found = pull([ct for ct in cotangents if ct is not None])
        return pick(spread(found, marks), wanted)


def _traced(f: Run) -> Run:
    """`f` of one tuple, with a tuple that autograd can differentiate as its result.

    The first argument comes last in it, since autograd warns of a result that depends
    on no argument, as second derivatives often do.
    """
    from autograd.builtins import tuple as traced_tuple

    def traced(xs: Arrays) -> object:
        arrays = [xs[n] for n in range(len(xs))]  # such a tuple can be indexed only
        return traced_tuple((*f(*arrays), arrays[0]))

    return traced


def _split(f: Run) -> tuple[Run, Callable[[Arrays], Arrays]]:
    """(a function of those results of `f` that have a derivative, a function that puts
    values for these in their places among the others).
    """
    outs: list[object] = []

    def moving(*xs: object) -> Arrays:
        outs[:] = f(*xs)
        return [x for x in outs if moves(x)]

    def whole(found: Arrays) -> Arrays:
        rest = iter(found)
        return [next(rest) if moves(x) else x for x in outs]

    return moving, whole


def moves(value: object) -> bool:
    """Whether a value has a derivative."""
    from autograd.tracer import getval

    return bool(jnp.issubdtype(np.result_type(getval(value)), jnp.inexact))
