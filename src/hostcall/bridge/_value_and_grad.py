"""`hc.bridge.value_and_grad`: a function that returns its value and its gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from hostcall._core.errors import ResultError, SpecError, wrong
from hostcall._core.host_code import HostCode
from hostcall._core.mistakes import check_function
from hostcall._host_function.host import host
from hostcall._host_function.rules import among
from hostcall._host_function.trees import pick
from hostcall._jax.types import TreeDef
from hostcall.bridge._library import (
    MADE_BY_A_BRIDGE,
    Arrays,
    Function,
    is_operand,
)

tree = jax.tree_util


def value_and_grad(
    fn: Callable[..., Any] | None = None,
    *,
    value: Callable[..., Any] | None = None,
    nondiff: int | tuple[int, ...] = (),
    result: Any = None,
    vmap_method: Any = None,
    arrays: Literal["numpy", "jax"] = "numpy",
    timeout: float | None = None,
    executor: Any = None,
    name: str | None = None,
) -> Any:
    """Makes a host function from one that returns (value, gradient).

    Optimisers take functions of this form, and adjoint solvers have it::

        @hc.bridge.value_and_grad
        def misfit(model, data):
            residual = solve(model) - data
            return 0.5 * residual @ residual, (adjoint(model, residual), -residual)

        jax.grad(misfit)(model, data)            # one call of `misfit`

    Args:
        fn: a pure function, `fn(*args) -> (value, gradient)`. The value is a real
            number; the gradient has the structure and shapes of the argument. With
            several differentiable arguments it is a tuple with one entry for each, None
            for zero. An argument is differentiable if it has floating arrays and is not
            in `nondiff`; entries for its integer arrays are ignored. Without `fn`,
            `value_and_grad` returns a decorator.
        value: `value(*args) -> value`, for calls that need no gradient. Without it they
            run `fn`.
        nondiff: as in `hc.host`: positions of arguments without a gradient.
        result: as in `hc.host`, a scalar. By default its dtype is the one to which the
            differentiable arguments promote.
        vmap_method: as in `hc.host`. If `fn` gets a whole batch at once, the value and
            each gradient have the batch axis in front.
        arrays: as in `hc.host`.
        timeout: as in `hc.host`.
        executor: as in `hc.host`.
        name: as in `hc.host`.

    Returns:
        A `HostFunction` that returns the value, differentiable once, in both modes.

    Raises:
        SpecError: an option is wrong, or a differentiable argument is complex (there
            are two conventions for its gradient, and nothing says which `fn` follows).
        DerivativeError: it is differentiated twice, when the program is traced.
        ResultError: `fn` returned something else, when the program runs; for the rest
            as `hc.call`.

    Under transformations:
        jit, scan, while_loop, cond, remat, shard_map, vmap: as `hc.host`.
        jvp, jacfwd: one call of `fn`; the program multiplies gradient and tangents.
        grad, value_and_grad, vjp: one call of `fn`, in the forward pass, which gives
            value and gradient. The gradient waits in the program as arrays; the
            backward pass multiplies it by the cotangent and calls nothing.

    Cost: that of one `hc.call`.

    Source: JAX's agjax and SciPy's `minimize(jac=True)` have this form.
    """
    options = dict(locals())  # the arguments, as long as there is no other local
    del options["fn"]
    if fn is None:
        return functools.partial(value_and_grad, **options)
    usage = "hc.bridge.value_and_grad(fn), with fn(*args) -> (value, gradient)"
    shown = name or check_function(fn, usage).name
    if value is not None and not callable(value):
        wanted = "a function of the same arguments that returns only the value"
        raise wrong("value", f"`{shown}`", wanted, value)
    del options["value"], options["result"]  # the two functions have their own
    options["name"] = shown
    # `function` is what the user gets. Its rule calls `pair`, for value and gradient.
    both = _Both(fn, shown, nondiff)
    alone = _ValueAlone(fn, shown, nondiff) if value is None else value
    spec = both.scalar if result is None else result
    function = host(alone, result=spec, **options)
    pair = host(both, result=functools.partial(both.spec, function), **options)
    pair.advice = (
        f"`{shown}` is differentiated twice, but hc.bridge.value_and_grad gives only"
        " its first derivative. Make the gradient a function with rules of its own"
        " (hc.host), and call it in a rule written in JAX code; or keep the second"
        " derivative out with jax.lax.stop_gradient"
    )
    function.defjvp(functools.partial(_jvp, both, pair), where="jax")
    return function


class _Both(HostCode):
    """`fn` with a flat gradient: a list with one entry for each floating array."""

    stays = MADE_BY_A_BRIDGE

    def __init__(
        self, fn: Callable[..., Any], name: str, nondiff: int | tuple[int, ...]
    ) -> None:
        # The user's name and signature, for messages and keywords.
        self.name = self.__name__ = self.__qualname__ = name
        self.fn = self.__wrapped__ = fn
        self.nondiff = (nondiff,) if isinstance(nondiff, int) else tuple(nondiff)

    def __call__(self, *args: Any) -> tuple[object, Arrays]:
        value, gradient = self.pair(args)
        moving = self.moving(args)
        by_argument = self._by_argument(gradient, list(moving))
        # The value is a scalar in each row, so its axes are those of a whole batch.
        batch = np.shape(value)
        flat_gradient = list[np.ndarray]()
        pairs = zip(moving.items(), by_argument, strict=True)
        for (position, leaves), of_argument in pairs:
            treedef = tree.tree_structure(args[position])
            if of_argument is None:  # zero
                row_shapes = [np.shape(x)[len(batch) :] for x in leaves]
                zeros = [np.zeros(batch + row, np.float32) for row in row_shapes]
                of_argument = treedef.unflatten(zeros)
            arrays = self._parts(treedef, of_argument, f"argument {position}")
            flat_gradient += pick(arrays, list(map(_floating, leaves)))
        return value, flat_gradient

    def _by_argument(self, gradient: object, positions: list[int]) -> Arrays:
        """The gradient of each argument that has one, None for zero."""
        gradients = (gradient,) if len(positions) == 1 else gradient
        if isinstance(gradients, tuple):
            # A named tuple is another structure than the tuple of gradients.
            gradients = tuple(gradients)
        one_for_each = tree.tree_structure((0,) * len(positions))
        return self._parts(one_for_each, gradients, f"the arguments {positions}")

    def _parts(self, treedef: TreeDef, gradient: object, subject: str) -> Arrays:
        """The parts of a gradient that has this structure; refuses any other."""
        try:
            return list(treedef.flatten_up_to(gradient))
        except (ValueError, TypeError) as error:
            raise ResultError(
                f"hostcall: the gradient that `{self.name}` returned for {subject}"
                f" should have the structure {treedef} (a tuple with one entry for"
                " each, if there are several, None for zero), got"
                f" {tree.tree_structure(gradient)}. Name the others in nondiff="
            ) from error

    def pair(self, args: Arrays) -> tuple[Any, Any]:
        """(value, gradient), as the function returned them."""
        answer = self.fn(*args)
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise ResultError(
                f"hostcall: `{self.name}` should return (value, gradient), got"
                f" {type(answer).__name__}"
            )
        return answer

    def moving(self, args: Arrays) -> dict[int, Arrays]:
        """The leaves of the arguments with a gradient, by position."""
        nondiff = among(self.nondiff, len(args))
        leaves_by_position = {}
        for position, arg in enumerate(args):
            leaves = tree.tree_leaves(arg)
            if position not in nondiff and any(map(_floating, leaves)):
                leaves_by_position[position] = leaves
        return leaves_by_position

    def floating(self, args: Arrays) -> Arrays:
        """The arrays with a gradient."""
        leaves = tree.tree_leaves(list(self.moving(args).values()))
        return list(filter(_floating, leaves))

    def spec(self, function: Function, *avals: object) -> tuple[object, Arrays]:
        return function._spec(avals), self.floating(avals)

    def scalar(self, *avals: object) -> jax.ShapeDtypeStruct:
        dtypes = [jnp.result_type(x) for x in self.floating(avals)]
        return jax.ShapeDtypeStruct((), jnp.result_type(*(dtypes or [float])))


class _ValueAlone(_Both):
    """The value alone."""

    stays = ""

    def __call__(self, *args: Any) -> Any:
        return self.pair(args)[0]


def _jvp(
    both: _Both, pair: Function, primals: Arrays, tangents: Arrays
) -> tuple[jax.Array, jax.Array]:
    """(value, its tangent): JAX code, which JAX transposes."""
    if any(jnp.iscomplexobj(x) for x in both.floating(primals)):
        raise SpecError(
            f"hostcall: `{both.name}` is differentiated with respect to a complex"
            " argument. There are two conventions for its gradient, and hostcall can't"
            " know which one the function follows. Pass the real and imaginary parts"
            " instead, or name the argument in nondiff="
        )
    value, gradients = pair(*primals)
    # One tangent for each gradient: integer arrays have float0 tangents, and no
    # gradient.
    leaves = tree.tree_leaves([tangents[n] for n in both.moving(primals)])
    arrays = map(jnp.asarray, leaves)
    moved = [x for x in arrays if x.dtype != jax.dtypes.float0]
    pairs = zip(gradients, moved, strict=True)
    terms = [jnp.sum(gradient * tangent) for gradient, tangent in pairs]
    assert terms, "without a floating argument nothing is differentiated"
    # From the first term on, so that the program has no sum with 0.
    tangent_of_value = sum(terms[1:], terms[0])
    return value, tangent_of_value.astype(value.dtype)


def _floating(x: object) -> bool:
    is_array = isinstance(x, jax.ShapeDtypeStruct) or is_operand(x)
    return is_array and bool(jnp.issubdtype(jnp.result_type(x), jnp.inexact))
