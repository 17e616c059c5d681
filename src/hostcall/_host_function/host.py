"""`hc.host`: turns a Python function into a HostFunction."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Literal, Protocol, TypedDict, Unpack, overload

import jax
import numpy as np

from hostcall._core.errors import counted, wrong
from hostcall._core.mistakes import check_function, refuse_unneeded
from hostcall._core.options import GONE, Arrays, Lend
from hostcall._core.order import Order
from hostcall._core.said_results import rule_of
from hostcall._core.signature_sizes import ResultSize
from hostcall._core.signatures import most_positions
from hostcall._core.suggestions import suggests
from hostcall._core.ufuncs import with_numbers
from hostcall._host_function.function import HostFunction
from hostcall._host_function.rules import P, R


class Options(TypedDict, total=False):
    """The options of `host`, for type checkers."""

    result: Any
    sizes: Mapping[str, ResultSize] | None
    dtype: Any
    vmap_method: str | Callable[..., Any] | None
    order: Order
    arrays: Arrays
    lend: Lend
    timeout: float | None
    executor: Any
    concurrency: int | None
    name: str | None
    tag: str | None
    nondiff: int | tuple[int, ...]
    float64: bool


class Decorator(Protocol):
    """What `host` returns without a function, for type checkers."""

    @overload
    def __call__(
        self, fn: Callable[P, Coroutine[Any, Any, R]], /
    ) -> HostFunction[P, R]: ...
    @overload
    def __call__(self, fn: Callable[P, R], /) -> HostFunction[P, R]: ...


class UfuncOfOneResult(Protocol):
    """A ufunc with one result, for type checkers."""

    @property
    def nin(self) -> int: ...
    @property
    def nout(self) -> Literal[1]: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


@overload  # a ufunc's own overloads are for scalars first
def host(
    fn: UfuncOfOneResult, **options: Unpack[Options]
) -> HostFunction[..., np.ndarray[Any, Any]]: ...


@overload
def host(fn: np.ufunc, **options: Unpack[Options]) -> HostFunction[..., Any]: ...


@overload
def host(
    fn: Callable[P, Coroutine[Any, Any, R]], **options: Unpack[Options]
) -> HostFunction[P, R]: ...


@overload
def host(fn: Callable[P, R], **options: Unpack[Options]) -> HostFunction[P, R]: ...


@overload
def host(**options: Unpack[Options]) -> Decorator: ...


@suggests("hc.host", gone=GONE)
def host(
    fn: Callable[..., Any] | None = None,
    *,
    result: Any = ...,
    sizes: Mapping[str, ResultSize] | None = None,
    dtype: Any = None,
    vmap_method: Any = None,
    order: Order = "pure",
    arrays: Arrays = "numpy",
    lend: Lend = False,
    timeout: float | None = None,
    executor: Any = None,
    concurrency: int | None = None,
    name: str | None = None,
    tag: str | None = None,
    nondiff: int | tuple[int, ...] = (),
    float64: bool = False,
) -> Any:
    """Makes a Python function part of JAX: its results, its batching and its
    derivatives are declared once.

        j1 = hc.host(scipy.special.j1)

        @hc.host(result="(n),(n)->()")
        def f(x, y): ...

        @f.defjvp
        def _(primals, tangents): ...

    Args:
        fn: as in `hc.call`; it and its rules may be coroutine functions. Without it,
            `host` returns a decorator.
        result: what `fn` returns. A ufunc says that itself, and so do jaxtyping's
            annotations: leave it out. Else a spec as in `hc.call`; or a signature as in
            `numpy.vectorize`, "(m,n),(n)->(m)", which names the axes of one item (axes
            in front of those broadcast); or a function from the arguments, with a
            ShapeDtypeStruct for each array, to a spec; or `hc.results.like(i)`, an
            array like argument `i`; `hc.results.same_tree(i)`, a pytree like it;
            `hc.results.elementwise`, a floating array to which all arguments broadcast;
            or "infer", which runs `fn` on zeros when a program is traced, once for each
            combination of shapes, dtypes and static arguments. It may be left out of a
            function that is only given to `hc.call`, which has a result of its own.
        sizes: with a signature, the sizes of dimensions that stand in results only:
            sizes={"k": 3}, or a function of other dimensions: {"k": lambda n: 2 * n}.
        dtype: with a signature or a ufunc, the dtype of the results, or a tuple with
            one for each. By default that to which JAX promotes the arguments; a ufunc's
            loop says whether the result is an integer, a floating number, complex or a
            bool.
        vmap_method: as in `hc.call`, for rules in host code too. Rules that leave
            Python objects as residuals run row by row ("parallel": all rows at once).
            Default: "expand_dims" for ufuncs, also generalized ones ("parallel" with an
            executor); else "sequential".
            With a signature, "sequential" and "parallel" pass one item at a time,
            however many axes the arguments have in front; the other methods pass all.
        arrays: as in `hc.call`, for rules too.
        lend: as in `hc.call`, for rules too. With "out", rules get views and return
            arrays. Rules that leave Python objects as residuals get copies.
        timeout: seconds, for rules too. If a run takes longer, the program fails, and
            the run goes on in its thread. A coroutine is cancelled. Default: no limit.
        executor: where the rows of vmap_method="parallel" run, for rules too: an
            Executor of concurrent.futures, a Dask client, `multiprocessing.Pool` or
            Ray's pool. Default: threads of this process. The function or rule and its
            arguments are sent to the other process. Residuals that it leaves come back,
            so they must be picklable.
        concurrency: how many calls of a coroutine function wait at the same time; the
            function and its rules count together. Default: 32.
        order: as in `hc.call`. Only pure functions have derivatives.
        name: the function's name in messages and traces.
        tag: as in `hc.call`; for rules in host code too.
        nondiff: positions of arguments without a derivative. They have no tangent,
            and differentiating with respect to them is an error.
        float64: whether floating arguments reach the function as float64, and complex
            ones as complex128, whatever JAX's mode. So do the arguments, tangents,
            cotangents and residual arrays of rules in host code; rules in JAX code
            have the program's dtypes. Integers stay as they are, and results get the
            dtypes that `result` declares. What is converted is a copy, with `lend` too.

    Returns:
        A `HostFunction`. It is called with arrays, pytrees of them and static objects,
        and its methods set its rules: `defjvp`, `defjvps`, `defvjp`, `deftranspose`,
        `defjacobian`, `defbatch`. It can be pickled if its function and rules can; its
        executor is left out.

    Raises:
        SpecError: an option, or an argument of a call, is wrong.
        DerivativeError: no rule gives the derivative that a program asks for (raised
            when it is traced or lowered), or a rule returned something wrong (raised
            when it runs).
        Otherwise as `hc.call`.

    The function may run on another thread than the caller's, and then does not see its
    context variables, np.errstate, tracing spans or thread-locals.
    The page "Call a simulator" says which thread it is.

    Under transformations:
        jit, scan, while_loop, cond, remat, shard_map: as a pure `hc.call`.
        vmap: `vmap_method`, or `defbatch`. Derivatives of batches, and batches of
            derivatives, run the rules once a row, or as `vmap_method` says; rows that
            differ only in their tangents (jax.jacfwd) share one value.
        jvp, jacfwd, linearize: `defjvp`; else `defjacobian`.
        grad, vjp, jacrev: `defvjp`; else `defjacobian`; else a `defjvp` in JAX code,
            which JAX transposes.
        linear_transpose: `deftranspose`. A linear function is its own derivative.
        hessian and higher orders: if rules are JAX code over functions with rules.
        remat: the forward pass runs the function, the backward pass `fwd` and `bwd`.

    Arguments whose tangents are zero cost no call; integers have float0 tangents.

    Cost: in a compiled program that of `hc.call`; lowering takes 0.4 ms more, and an
    eager call 60 us. A `defjvp` rule that returns (result, tangent) is one call for
    both, and `defjacobian` is one call for all rows and columns of a Jacobian.
    """
    # First, while the parameters are all that there is.
    options = {k: v for k, v in dict(locals()).items() if k != "fn"}
    if fn is None:
        return functools.partial(host, **options)
    shown = check_function(fn, "hc.host(fn, result=...)", awaits=True).name
    if name is not None and not isinstance(name, str):
        raise wrong("name", f"`{shown}`", "a text", name)
    shown = name or shown
    options["nondiff"] = positions(shown, nondiff, fn)
    sizes = options.pop("sizes")
    dtype = options.pop("dtype")
    rule = rule_of(fn, shown, result, sizes=sizes, dtype=dtype, float64=float64)
    options["result"] = rule
    function = HostFunction(with_numbers(fn, rule), **options)
    # A pure function without results would never be called.
    if function.options.order == "pure" and not jax.tree.leaves(rule):
        refuse_unneeded("hc.host", shown)
    return function


def positions(
    shown: str,
    nondiff: int | tuple[int, ...],
    fn: Callable[..., Any] | None = None,
) -> tuple[int, ...]:
    """The positions in `nondiff`; raises SpecError if it is something else.

    Args:
        shown: the name of the function.
        nondiff: as `hc.host` takes it.
        fn: the function, if the positions are those of its arguments.
    """
    numbers = nondiff if isinstance(nondiff, (tuple, list)) else (nondiff,)
    most = math.inf if fn is None else most_positions(fn)
    for number in numbers:
        if type(number) is not int:
            raise wrong("nondiff", f"`{shown}`", "positions of arguments", nondiff)
    for number in numbers:
        if not -most <= number < most:
            wanted = f"positions of arguments, from 0 to {most - 1}"
            if most == 0:
                wanted = "left out"
            advice = f". It takes {counted(int(most), 'argument')} by position"
            raise wrong("nondiff", f"`{shown}`", wanted, nondiff, advice)
    return tuple(numbers)
