"""`hc.bridge.autograd`: a function written with autograd.numpy."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from hostcall._core.arguments import check_function, wrong
from hostcall._core.source import source_of
from hostcall._host_function.trees import pick, spread
from hostcall.bridge._library import (
    Arrays,
    Code,
    Flags,
    LibraryFunction,
    TakesNoRules,
    along,
    check_derivatives,
    is_array,
    needed,
)

tree = jax.tree_util

Run: TypeAlias = Callable[..., object]
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
    shown = name or check_function(fn, "hc.bridge.autograd(fn)")
    needed("autograd", "autograd")
    options["advice"] = check_derivatives("autograd", shown, derivatives)
    if vmap_method not in (None, "sequential", "parallel"):
        why = ": autograd differentiates one row at a time"
        wanted = "'sequential' or 'parallel'"
        raise wrong("vmap_method", f"`{shown}`", wanted, vmap_method, why)
    make_thread_safe()
    return OfAutograd(FromAutograd(fn, shown, source_of(fn), fn), **options)


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

    def __call__(self, *args: object) -> object:
        return self.run(*args)

    @staticmethod
    def over(what: str, run: Run) -> Run:
        return functools.partial(_pulled if what == "vjp" else _pushed, run)

    def forward(self, args: Arrays, _: object) -> tuple[object, Graph]:
        moving = [moves(x) for x in tree.tree_leaves(args) if is_traced_array(x)]
        found = Along(self.run, args, moving)
        pull = found.vjp()
        return found.treedef.unflatten(found.outs), (pull, moving)

    @staticmethod
    def backward(graph: Graph, cotangents: Arrays, wanted: Flags) -> Arrays:
        pull, moving = graph
        return pick(spread(pull(cotangents), moving), wanted)


def _pulled(run: Run, args: Arrays, cotangents: Arrays, wanted: bytes) -> Arrays:
    return Along(run, args, wanted).vjp()(cotangents)


def _pushed(
    run: Run, args: Arrays, tangents: Arrays, out_diff: bytes
) -> tuple[Arrays, Arrays]:
    found = Along(run, args, [t is not None for t in tangents])
    touts = found.jvp([t for t in tangents if t is not None])
    return found.outs, pick(touts, out_diff)


class Along:
    """A function along some of the arrays of its arguments.

    Attributes:
        outs, treedef: its result, once a derivative has run it.
    """

    def __init__(self, run: Run, args: Arrays, flags: Flags) -> None:
        """`flags` marks the arrays that move, among all arrays of `args`."""
        self._run = run
        moving, self._filled, _ = along(args, flags, is_traced_array)
        self._moving = tuple(moving)

    def _call(self, moving: Arrays) -> object:
        """The tuple of results with a derivative, of the tuple of what moves.

        The last is the first argument, since autograd warns of a result that depends on
        no argument, as second derivatives often do.
        """
        from autograd.builtins import tuple as traced_tuple

        result = self._run(*self._filled(moving))
        self.outs, self.treedef = tree.tree_flatten(result)
        self._marks = [moves(x) for x in self.outs]
        return traced_tuple((*pick(self.outs, self._marks), moving[0]))

    def _with_all(self, found: Arrays, others: Arrays) -> Arrays:
        """What `_call` gave, and in the places of the other results `others`."""
        whole = spread(found, self._marks)
        return [y if x is None else x for x, y in zip(whole, others, strict=True)]

    def jvp(self, tangents: Arrays) -> Arrays:
        """The tangents of all results."""
        from autograd import make_jvp

        found, dots = make_jvp(self._call)(self._moving)(tuple(tangents))
        self.outs = self._with_all(found, self.outs)
        return self._with_all(dots, [np.zeros(np.shape(x)) for x in self.outs])

    def vjp(self) -> Pull:
        """Cotangents of the results, None for zero -> those of what moves."""
        from autograd import make_vjp
        from autograd.tracer import getval

        pull, found = make_vjp(self._call)(self._moving)
        self.outs = self._with_all(found, self.outs)
        marks, zeros = self._marks, [np.zeros_like(getval(x)) for x in found]

        def pullback(cotangents: Arrays) -> Arrays:
            pairs = zip((*pick(cotangents, marks), None), zeros, strict=True)
            return list(pull(tuple(zero if ct is None else ct for ct, zero in pairs)))

        return pullback


def is_traced_array(leaf: object) -> bool:
    """Whether a leaf is an array that the call hands over, or a variable for one."""
    from autograd.tracer import getval

    return is_array(getval(leaf))


def moves(value: object) -> bool:
    """Whether a value has a derivative."""
    from autograd.tracer import getval

    return bool(jnp.issubdtype(np.result_type(getval(value)), jnp.inexact))
