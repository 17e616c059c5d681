"""What `result=` of `hc.host` may say: a spec, a function that gives one, or a
shorthand (`like`, `same_tree`, `elementwise`, "infer").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hostcall import _jax
from hostcall._core.errors import SpecError, counted
from hostcall._core.host_code import OfArguments
from hostcall._core.options import VmapMethod
from hostcall._core.spec import is_array_like, widened
from hostcall._host_function.primitives import Arrays
from hostcall._host_function.rules import (
    Function,
    Kind,
    Tree,
    Trees,
    call_here,
)
from hostcall._host_function.trees import RuleTrees

tree = jax.tree_util


@dataclass(frozen=True)
class like(OfArguments):
    """`result=hc.results.like(i)`: the result is an array like argument `i`.

    Args:
        argument: the position of the argument, which must be one array. For a pytree
            use `hc.results.same_tree(i)`.
    """

    argument: int

    def spec(self, args: Trees, name: str) -> Tree:
        found = _argument(self, args, name)
        if not _is_aval(found):
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

    def spec(self, args: Trees, name: str) -> Tree:
        found = _argument(self, args, name)
        return tree.tree_map(lambda x: x if _is_aval(x) else None, found)


def _argument(which: like | same_tree, args: Trees, name: str) -> Tree:
    """The argument, with a ShapeDtypeStruct for each array."""
    number, n = which.argument, len(args)
    if not isinstance(number, int) or not -n <= number < n:
        raise SpecError(
            f"hostcall: `{name}` has result=hc.results.{type(which).__name__}"
            f"({number!r}), and was called with {counted(n, 'argument')}. Give the"
            " position of one of them, from 0",
            code="hc-result-spec",
        )
    return tree.tree_map(aval_of, args[number])


def elementwise(*args: Any) -> jax.ShapeDtypeStruct:
    """`result=hc.results.elementwise`: a floating array, as NumPy's ufuncs return.

    Its shape is the one to which all array arguments broadcast. Its dtype is the one to
    which JAX promotes theirs; if all are integers, it is the default floating dtype
    (float32, or float64 in 64-bit mode). Python's numbers are weakly typed, as in JAX.

    If `vmap_method` passes whole batches, the function (and a `defjvp` rule in host
    code) gets arguments with as many axes as the result: axes of length 1 are put in
    front, so that the batch axes line up.
    """
    leaves = list(filter(_is_aval, map(aval_of, tree.tree_leaves(args))))
    shapes = [x.shape for x in leaves]
    symbolic = _jax.has_symbolic(leaves)
    shape = (jnp if symbolic else np).broadcast_shapes(*shapes)
    strong = [x.dtype for x in leaves if not x.weak_type]
    weak = [_SCALARS[x.dtype.kind] for x in leaves if x.weak_type]
    dtype = jnp.result_type(*strong, *weak) if leaves else jnp.result_type(float)
    if not jnp.issubdtype(dtype, jnp.inexact):
        dtype = jnp.result_type(dtype, float)
    return jax.ShapeDtypeStruct(shape, dtype)


def with_axes(arrays: Sequence[jax.Array], n: int) -> list[jax.Array]:
    """The arrays with `n` axes each; axes of length 1 are put in front."""
    shapes = [np.shape(x) for x in arrays]
    return [
        x if len(shape) == n else jnp.reshape(x, (1,) * (n - len(shape)) + shape)
        for x, shape in zip(arrays, shapes, strict=True)
    ]


_SCALARS = {"b": False, "i": 0, "u": 0, "f": 0.0, "c": 0j}


def aval_of(leaf: Tree) -> Tree:
    """A ShapeDtypeStruct for an array; other leaves themselves."""
    if isinstance(leaf, jax.Array):
        weak = _jax.aval_of(leaf).weak_type
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=weak)
    if is_array_like(leaf):
        weak = type(leaf) in (bool, int, float, complex)  # not np.float64
        shape, dtype = np.shape(leaf), _jax.canonical_dtype(np.result_type(leaf))
        return jax.ShapeDtypeStruct(shape, dtype, weak_type=weak)
    return leaf


def _is_aval(leaf: Tree) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def varies(result: Tree) -> bool:
    """Whether `result=` is no spec, but something that gives one."""
    if result is ... or isinstance(result, (str, like, same_tree)):
        return True
    return callable(result) and not hasattr(result, "shape")


def spec_of(result: Tree, args: Trees, name: str) -> Tree:
    """The spec that `result=`, unless it is "infer", gives for these arguments, or for
    their avals.
    """
    if isinstance(result, (like, same_tree)):
        return result.spec(args, name)
    avals = tree.tree_map(aval_of, args)
    try:
        return result(*avals)
    except SpecError:  # a bridge's, which says all
        raise
    except Exception as error:
        given = ", ".join(map(_short, avals))
        raise SpecError(
            f"hostcall: the result= function of `{name}` failed for ({given}):"
            f" {type(error).__name__}: {error}. It gets a ShapeDtypeStruct for each"
            " array, and should return what result= of hc.call may be",
            code="hc-result-spec",
        ) from error


def _short(arg: Tree) -> str:
    if isinstance(arg, jax.ShapeDtypeStruct):
        return f"{arg.dtype}{list(arg.shape)}"
    return str(tree.tree_map(_short, arg) if tree.tree_leaves(arg) != [arg] else arg)


def inferred(fn: Function, avals: Trees, name: str, float64: bool) -> Tree:
    """The spec of what the function returns for zeros."""

    def zeros(leaf: Tree) -> Tree:
        if not _is_aval(leaf):
            return leaf
        wide = widened(leaf.dtype) if float64 else None
        return np.zeros(leaf.shape, wide or leaf.dtype)

    try:
        value = call_here(fn, tree.tree_map(zeros, avals))
    except Exception as error:
        raise SpecError(
            f"hostcall: `{name}` has result='infer', and failed on zeros:"
            f" {type(error).__name__}: {error}. Say what it returns with result=",
            code="hc-result-spec",
        ) from error
    return tree.tree_map(lambda leaf: aval_of(np.asarray(leaf)), value)


def aligned(
    args: Arrays, site: RuleTrees, kind: Kind, method: VmapMethod
) -> tuple[Arrays, VmapMethod]:
    """Gives the operands of an elementwise function as many axes as the result.

    `kind` says which of its codes takes them; `method` is how batches of it are called,
    and comes back as it is for these operands.

    A batch is one more axis in front of each operand. Without this, a batch of 16
    scalars beside one row of 9 would be (16,) beside (1, 9), which does not
    broadcast, and a batch of 9 scalars beside 9 rows of 9 would be taken for a row.
    The operands and results of the other rules have axes of their own; if those
    differ in number from the result's, the rows run one by one.
    """
    axes = len(site.avals[0].shape)
    jacobian = kind == "jacobian" and site.diagonal
    if kind not in ("value", "jvp", "both") and not jacobian:
        avals = site.unmasked(site.in_avals)
        if any(len(aval.shape) != axes for aval in avals):
            method = "sequential"
        return args, method
    if kind != "value" and method == "expand_dims":
        # A rule may ignore the very argument that has the batch.
        method = "broadcast_all"
    return with_axes(args, axes), method
