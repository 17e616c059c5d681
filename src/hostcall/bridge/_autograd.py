"""`hc.bridge.autograd`: a function written with autograd.numpy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from hostcall._core.arguments import check_function
from hostcall._core.errors import SpecError
from hostcall._core.spec import Template
from hostcall._host_function.results import spec_of
from hostcall.bridge._autograd_programs import OfFlat, make_thread_safe
from hostcall.bridge._programs import Bridged, HostProgram, Struct, needed

tree = jax.tree_util


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
    if fn is None:
        given = {k: v for k, v in locals().items() if k != "fn"}
        return functools.partial(of_autograd, **given)
    shown = name or check_function(fn, "hc.bridge.autograd(fn)")
    needed("autograd", "autograd")
    make_thread_safe()
    if not isinstance(derivatives, int) or derivatives < 0:
        raise SpecError(
            f"hostcall: derivatives= of `{shown}` should be the number of times that it"
            f" can be differentiated, 0 or more, got {derivatives!r}",
            code="hc-option",
        )
    if vmap_method not in (None, "sequential", "parallel"):
        raise SpecError(
            f"hostcall: vmap_method= of `{shown}` should be 'sequential' or 'parallel',"
            f" got {vmap_method!r}: autograd differentiates one row at a time",
            code="hc-option",
        )
    options = {
        "vmap_method": vmap_method,
        "timeout": timeout,
        "executor": executor,
    }
    return OfAutograd(fn, name, result, derivatives, options)


class OfAutograd(Bridged):
    """A function of autograd's NumPy. `hc.bridge.autograd` makes it."""

    def __init__(
        self,
        fn: Callable[..., Any],
        name: str | None,
        result: Any,
        derivatives: int,
        options: dict[str, Any],
    ) -> None:
        super().__init__(
            fn,
            name=name,
            result=result,
            nondiff=(),
            order="pure",
            lend=False,
            arrays="numpy",
            **options,
        )
        self.derivatives = derivatives
        self._programs: dict[Any, tuple[HostProgram, Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function and returns its result."""
        if kwargs:
            args = self._positional(args, kwargs)
        return super().__call__(*args)

    def _program(
        self, template: Template, avals: tuple[Struct, ...], x64: bool
    ) -> tuple[HostProgram, Any, Sequence[Any]]:
        key = (template, tuple((a.shape, a.dtype, a.weak_type) for a in avals), x64)
        if key not in self._programs:
            self._programs[key] = self._made(template, avals)
        return *self._programs[key], ()

    def _made(
        self, template: Template, avals: tuple[Struct, ...]
    ) -> tuple[HostProgram, Any]:
        args, _ = template.fill(avals)
        spec = spec_of(self.result, self.fn, args, self.__name__)
        leaves, out_tree = tree.tree_flatten(spec)
        leaves = [Struct(x.shape, x.dtype) for x in leaves]
        fn = self.fn

        def flat(*arrays: Any) -> list[Any]:
            return list(out_tree.flatten_up_to(fn(*template.fill(arrays)[0])))

        program = OfFlat(
            self.__name__,
            flat,
            tuple(Struct(a.shape, a.dtype) for a in avals),
            tuple(leaves),
            self.derivatives,
            dict(self.options),
        )
        return program, out_tree
