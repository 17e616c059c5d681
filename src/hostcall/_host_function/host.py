"""`hc.host`: makes a HostFunction of a Python function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from hostcall._core.arguments import check_function
from hostcall._core.errors import SpecError
from hostcall._core.mistakes import refuse_unneeded
from hostcall._core.order import Order
from hostcall._engine.params.call import Arrays, Lend
from hostcall._host_function.function import HostFunction
from hostcall._primitives.call.options import check_options


def host(
    fn: Callable[..., Any] | None = None,
    *,
    result: Any,
    vmap_method: Any = None,
    order: Order = "pure",
    arrays: Arrays = "numpy",
    lend: Lend = False,
    timeout: float | None = None,
    executor: Any = None,
    name: str | None = None,
    nondiff: int | tuple[int, ...] = (),
) -> Any:
    """Makes a Python function a citizen of JAX: what it returns, how it batches, and
    what its derivatives are, said once.

        j1 = hc.host(scipy.special.j1, result=hc.like(0), vmap_method="expand_dims")

        @hc.host(result=hc.elementwise)
        def f(x, y): ...

        @f.defjvp
        def _(primals, tangents): ...

    Args:
        fn: as in `hc.call`. Without it, a decorator.
        result: what `fn` returns. A spec as in `hc.call`; a function from the
            arguments, with a ShapeDtypeStruct for each array, to a spec; `hc.like(i)`,
            an array like argument `i`; `hc.same_tree(i)`, a pytree like it;
            `hc.elementwise`, a floating array to which all arguments broadcast;
            "infer": `fn` is run once on zeros when a program is traced, and again only
            for other shapes, dtypes or static arguments.
        vmap_method: as in `hc.call`, for rules in host code too; those that leave
            Python objects as residuals run row by row ("parallel": at once).
        arrays: as in `hc.call`, for rules too.
        lend: likewise. With "out" rules get views, and return arrays; those that
            leave Python objects get copies.
        timeout: as in `hc.call`, for rules too.
        executor: likewise. To another process go the function, or a rule, and its
            arguments; what they leave as residuals comes back, and is picklable.
        order: as in `hc.call`. Only pure functions have derivatives.
        name: of the function in messages and traces.
        nondiff: positions of arguments without a derivative. They have no tangent,
            and differentiating with respect to them is an error.

    Returns:
        A `HostFunction`, to be called with arrays, pytrees of them and static objects,
        and given rules by its methods: `defjvp`, `defjvps`, `defvjp`, `deftranspose`,
        `defjacobian`, `defbatch`. It can be pickled where its function and rules can,
        without its executor.

    Raises:
        SpecError: something here, or in a call, is written wrong.
        DerivativeError: a derivative is asked for that no rule gives, when the program
            is traced or lowered. What rules return wrong is one too, when they run.
        Otherwise as `hc.call`.

    Under transformations:
        jit, scan, while_loop, cond, remat, shard_map: as a pure `hc.call`.
        vmap: `vmap_method`, or `defbatch`. Derivatives of batches, and batches of
            derivatives, run the rules once a row, or as `vmap_method` says; rows that
            differ in their tangents only (jax.jacfwd) share one value.
        jvp, jacfwd, linearize: `defjvp`; else `defjacobian`.
        grad, vjp, jacrev: `defvjp`; else `defjacobian`; else a `defjvp` in JAX code,
            which JAX transposes.
        linear_transpose: `deftranspose`. A linear function is its own derivative.
        hessian and higher orders: where rules are JAX code over functions with rules.
        remat: the forward pass runs the function, the backward pass `fwd` and `bwd`.
        Arguments whose tangents are zero cost no call; integers have float0.

    Cost: in a program that of `hc.call`; lowering it is 0.4 ms more, an eager call 60
    us. A `defjvp` rule that returns (result, tangent) is one call for both, and
    `defjacobian` one for all rows and columns of a Jacobian.
    """
    if fn is None:
        options = {k: v for k, v in locals().items() if k != "fn"}
        return functools.partial(host, **options)
    shown = name or check_function(fn, "hc.host(fn, result=...)")
    check_options(shown, order, vmap_method, arrays, lend, timeout, executor)
    positions = checked(shown, result, nondiff)
    if order == "pure" and not jax.tree.leaves(result):
        refuse_unneeded("hc.host", shown)
    return HostFunction(
        fn,
        name=name,
        result=result,
        nondiff=positions,
        order=order,
        lend=lend,
        vmap_method=vmap_method,
        arrays=arrays,
        timeout=timeout,
        executor=executor,
    )


def checked(shown: str, result: Any, nondiff: int | tuple[int, ...]) -> tuple[int, ...]:
    """The positions in `nondiff`; refuses what result= and nondiff= can't be."""
    if isinstance(result, str) and result != "infer":
        raise SpecError(
            f"hostcall: result= of `{shown}` is {result!r}. The only word is 'infer';"
            " else give a spec, a function, hc.like(i), hc.same_tree(i) or"
            " hc.elementwise"
        )
    positions = (nondiff,) if isinstance(nondiff, int) else tuple(nondiff)
    if not all(isinstance(n, int) for n in positions):
        raise SpecError(
            f"hostcall: nondiff= of `{shown}` should be positions of arguments, got"
            f" {nondiff!r}"
        )
    return positions
