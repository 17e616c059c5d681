"""What `result=` of `hc.host` may say: a spec, a function that gives one, or a
shorthand (`like`, `same_tree`, `elementwise`, "infer").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hostcall import _jax
from hostcall._core.coroutines import is_coroutine_function
from hostcall._core.counted import counted
from hostcall._core.errors import SpecError
from hostcall._core.host_code import OfArguments
from hostcall._core.spec import is_array_like
from hostcall._policies.on_loop import run_one

tree = jax.tree_util


@dataclass(frozen=True)
class like(OfArguments):
    """`result=hc.results.like(i)`: the result is an array like argument `i`.

    Args:
        argument: the position of the argument, which must be one array. For a pytree
            use `hc.results.same_tree(i)`.
    """

    argument: int

    def spec(self, args: tuple[Any, ...], name: str) -> Any:
        found = _argument(self.argument, args, name, "like")
        if not hasattr(found, "shape"):
            raise SpecError(
                f"hostcall: `{name}` has result=hc.results.like({self.argument}), and"
                f" argument {self.argument} is not an array but"
                f" {tree.tree_structure(found)}. For a result with its structure write"
                f" hc.results.same_tree({self.argument})",
                code="hc-result-spec",
            )
        return found


@dataclass(frozen=True)
class same_tree(OfArguments):
    """`result=hc.results.same_tree(i)`: the result is a pytree like argument `i`.

    Args:
        argument: the position of the argument. The result has its structure, shapes
            and dtypes; leaves that aren't arrays become None.
    """

    argument: int

    def spec(self, args: tuple[Any, ...], name: str) -> Any:
        found = _argument(self.argument, args, name, "same_tree")
        return tree.tree_map(lambda x: x if hasattr(x, "shape") else None, found)


def _argument(number: int, args: tuple[Any, ...], name: str, what: str) -> Any:
    if not isinstance(number, int) or not -len(args) <= number < len(args):
        raise SpecError(
            f"hostcall: `{name}` has result=hc.results.{what}({number!r}), and was"
            f" called with {counted(len(args), 'argument')}. Give the position of one"
            " of them, from 0",
            code="hc-result-spec",
        )
    return args[number]


def elementwise(*args: Any) -> jax.ShapeDtypeStruct:
    """`result=hc.results.elementwise`: a floating array, as NumPy's ufuncs return.

    Its shape is the one to which all array arguments broadcast. Its dtype is the one to
    which JAX promotes theirs; if all are integers, it is the default floating dtype
    (float32, or float64 in 64-bit mode). Python's numbers are weakly typed, as in JAX.

    If `vmap_method` passes whole batches, the function (and a `defjvp` rule in host
    code) gets arguments with as many axes as the result: axes of length 1 are put in
    front, so that the batch axes line up.
    """
    leaves = [x for x in tree.tree_leaves(args) if hasattr(x, "shape")]
    shapes = [x.shape for x in leaves]
    symbolic = _jax.has_symbolic(leaves)
    shape = (jnp if symbolic else np).broadcast_shapes(*shapes)
    strong = [x.dtype for x in leaves if not getattr(x, "weak_type", False)]
    weak = [_SCALARS[x.dtype.kind] for x in leaves if getattr(x, "weak_type", False)]
    dtype = jnp.result_type(*strong, *weak) if leaves else jnp.result_type(float)
    if not jnp.issubdtype(dtype, jnp.inexact):
        dtype = jnp.result_type(dtype, float)
    return jax.ShapeDtypeStruct(shape, dtype)


def with_axes(arrays: Sequence[Any], n: int) -> list[Any]:
    """The arrays with `n` axes each; axes of length 1 are put in front."""
    shapes = [np.shape(x) for x in arrays]
    return [
        x if len(shape) == n else jnp.reshape(x, (1,) * (n - len(shape)) + shape)
        for x, shape in zip(arrays, shapes, strict=True)
    ]


_SCALARS: dict[str, Any] = {"b": False, "i": 0, "u": 0, "f": 0.0, "c": 0j}


def avals_of(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments, with a ShapeDtypeStruct in place of each array."""

    def aval(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array):
            weak = bool(getattr(leaf, "weak_type", False))
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=weak)
        if is_array_like(leaf):
            weak = type(leaf) in (bool, int, float, complex)  # not np.float64
            shape, dtype = np.shape(leaf), _jax.canonical_dtype(np.result_type(leaf))
            return jax.ShapeDtypeStruct(shape, dtype, weak_type=weak)
        return leaf

    return tree.tree_map(aval, args)  # type: ignore[no-any-return]


def spec_of(result: Any, fn: Callable[..., Any], args: Any, name: str) -> Any:
    """The spec that `result=` means for these arguments, or for their avals."""
    if isinstance(result, str) and result == "infer":
        return _inferred(fn, avals_of(args), name)
    if issubclass(type(result), OfArguments):
        return result.spec(avals_of(args), name)
    if not callable(result) or hasattr(result, "shape"):
        return result
    avals = avals_of(args)
    try:
        return result(*avals)
    except Exception as error:
        given = ", ".join(_short(a) for a in avals)
        raise SpecError(
            f"hostcall: the result= function of `{name}` failed for ({given}):"
            f" {type(error).__name__}: {error}. It gets a ShapeDtypeStruct for each"
            " array, and should return what result= of hc.call may be",
            code="hc-result-spec",
        ) from error


def _short(arg: Any) -> str:
    if hasattr(arg, "shape"):
        return f"{arg.dtype}{list(arg.shape)}"
    return str(tree.tree_map(_short, arg) if tree.tree_leaves(arg) != [arg] else arg)


def _inferred(fn: Callable[..., Any], args: Any, name: str) -> Any:
    zeros = tree.tree_map(
        lambda x: np.zeros(x.shape, x.dtype) if hasattr(x, "shape") else x, args
    )
    try:
        value = run_one(fn, *zeros) if is_coroutine_function(fn) else fn(*zeros)
    except Exception as error:
        raise SpecError(
            f"hostcall: `{name}` has result='infer', and failed on zeros:"
            f" {type(error).__name__}: {error}. Say what it returns with result=",
            code="hc-result-spec",
        ) from error

    def spec(leaf: Any) -> jax.ShapeDtypeStruct:
        dtype = _jax.canonical_dtype(np.asarray(leaf).dtype)
        return jax.ShapeDtypeStruct(np.shape(leaf), dtype)

    return tree.tree_map(spec, value)


def aligned(
    args: list[Any], trees: Any, kind: str, options: dict[str, Any]
) -> list[Any]:
    """Gives the operands of an elementwise function as many axes as the result.

    `kind` says which of its codes takes them; `options` are those of the call, whose
    vmap_method may change.

    A batch is one more axis in front of each operand. Without this, a batch of 16
    scalars beside one row of 9 would be (16,) beside (1, 9), which does not
    broadcast, and a batch of 9 scalars beside 9 rows of 9 would be taken for a row.
    The operands and results of the other rules have axes of their own; if those
    differ in number from the result's, the rows run one by one.
    """
    axes = len(trees.results.avals[0].shape)
    if kind not in ("value", "jvp", "both"):
        avals = trees.in_avals[: len(trees.template.keys)]
        if any(len(aval.shape) != axes for aval in avals):
            options["vmap_method"] = "sequential"
        return args
    if kind != "value" and options["vmap_method"] == "expand_dims":
        # A rule may ignore the very argument that has the batch.
        options["vmap_method"] = "broadcast_all"
    return with_axes(args, axes)
