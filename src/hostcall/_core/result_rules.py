"""What `result=` may say that depends on the arguments: a function from their specs to
a spec, or a rule (`like`, `same_tree`, `elementwise`, a signature, a ufunc's own, what
the function's annotations say).

Rules are classes of their own (`OfArguments`), so that what a HostFunction or a call
needs to know of them is asked of the rule: the spec for these arguments, which of an
argument's axes belong to one item, how `repr` shows it. `elementwise` alone is a plain
function, since users may call it in one of their own; it is told by identity.

Rules see arguments as ShapeDtypeStructs (`avals_of`), so that they say the same of
tracers, arrays, and what `jax.eval_shape` gets. Sizes may be symbolic, in an export.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hostcall import _jax
from hostcall._core.array_values import NUMBERS, is_array_like
from hostcall._core.errors import SpecError, counted
from hostcall._core.host_code import OfArguments

Tree = Any  # a pytree: of arrays, or of ShapeDtypeStructs
Trees = tuple[Tree, ...]

tree = jax.tree_util


@dataclass(frozen=True)
class like(OfArguments):
    """`result=hc.results.like(i)`: the result is an array like argument `i`.

    Args:
        argument: the position of the argument, which must be one array. For a pytree
            use `hc.results.same_tree(i)`.
    """

    argument: int

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.argument!r})"

    def spec(self, avals: Trees, name: str) -> Tree:
        argument = _argument(self, avals, name)
        if not is_aval(argument):
            raise SpecError(
                f"hostcall: `{name}` has result=hc.results.like({self.argument}), and"
                f" argument {self.argument} is not an array but"
                f" {tree.tree_structure(argument)}. For a result with its structure"
                f" write hc.results.same_tree({self.argument})",
                code="hc-result-spec",
            )
        return argument


@dataclass(frozen=True)
class same_tree(OfArguments):
    """`result=hc.results.same_tree(i)`: the result is a pytree like argument `i`.

    Args:
        argument: the position of the argument. The result has its structure, shapes
            and dtypes; leaves that aren't arrays become None.
    """

    argument: int

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.argument!r})"

    def spec(self, avals: Trees, name: str) -> Tree:
        argument = _argument(self, avals, name)
        return tree.tree_map(lambda leaf: leaf if is_aval(leaf) else None, argument)


def _argument(rule: like | same_tree, avals: Trees, name: str) -> Tree:
    """The argument that a rule names by its position."""
    number = rule.argument
    count = len(avals)
    # Below 0 it counts from the end, as Python's positions do.
    if not isinstance(number, int) or not -count <= number < count:
        raise SpecError(
            f"hostcall: `{name}` has result=hc.results.{type(rule).__name__}"
            f"({number!r}), and was called with {counted(count, 'argument')}. Give the"
            " position of one of them, from 0",
            code="hc-result-spec",
        )
    return avals[number]


def elementwise(*args: Any) -> jax.ShapeDtypeStruct:
    """`result=hc.results.elementwise`: a floating array, as NumPy's ufuncs return.

    Its shape is the one to which all array arguments broadcast. Its dtype is the one to
    which JAX promotes theirs; if all are integers, it is the default floating dtype
    (float32, or float64 in 64-bit mode). Python's numbers are weakly typed, as in JAX.

    If `vmap_method` passes whole batches, the function (and a `defjvp` rule in host
    code) gets arguments with as many axes as the result: axes of length 1 are put in
    front, so that the batch axes line up.
    """
    leaves = [aval_of(leaf) for leaf in tree.tree_leaves(args)]
    avals = [leaf for leaf in leaves if is_aval(leaf)]  # others are static
    shape = broadcast([aval.shape for aval in avals])
    dtype = floating(promoted(avals))
    return jax.ShapeDtypeStruct(shape, dtype)


def broadcast(shapes: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """The shape to which these broadcast; their sizes may be symbolic.

    Raises:
        ValueError: they don't.
    """
    longest = max(shapes, key=len, default=())
    if all(not shape or shape == longest for shape in shapes):  # as nearly always
        return longest
    sizes = itertools.chain.from_iterable(shapes)
    if any(map(_jax.is_symbolic, sizes)):
        return tuple(jnp.broadcast_shapes(*shapes))
    # NumPy is faster, and can't compare the sizes of exported programs.
    return tuple(np.broadcast_shapes(*shapes))


def promoted(avals: Sequence[jax.ShapeDtypeStruct]) -> np.dtype:
    """The dtype to which JAX promotes these; Python's numbers are weakly typed.

    Typed PRNG keys count for nothing: they are no numbers.
    """
    only = _only_dtype(avals)
    if isinstance(only, np.dtype):  # JAX takes some 10 us, for the same answer
        canonical: np.dtype = _jax.canonical_dtype(only)
        return canonical
    promoting: list[Any] = []
    for aval in avals:
        if not isinstance(aval.dtype, np.dtype):
            continue  # a typed key
        # A Python number stands for a weak type: JAX knows these by their class.
        number = _SCALARS[aval.dtype.kind] if aval.weak_type else aval.dtype
        promoting.append(number)
    if not promoting:
        promoting = [float]
    dtype: np.dtype = jnp.result_type(*promoting)
    return dtype


def _only_dtype(avals: Sequence[jax.ShapeDtypeStruct]) -> Any:
    """The dtype that all have, none of them weakly, as nearly always; else None."""
    dtype = avals[0].dtype if avals else None
    for aval in avals:
        if aval.dtype != dtype or aval.weak_type:
            return None
    return dtype


def floating(dtype: np.dtype) -> np.dtype:
    """The dtype itself, or the default floating one if it is an integer's."""
    # JAX knows bfloat16 and its like as floating, whose kind is NumPy's "V".
    if dtype.kind in "fc" or jnp.issubdtype(dtype, jnp.inexact):
        return dtype
    default: np.dtype = jnp.result_type(dtype, float)
    return default


def at_precision(dtype: np.dtype, precision: np.dtype) -> np.dtype:
    """A dtype at the precision of another one, which is floating or complex.

    That of integers and bools is as JAX has it in its mode.
    """
    if dtype.kind == precision.kind == "f":  # as nearly always; JAX takes 3 us to ask
        return precision
    if not jnp.issubdtype(dtype, jnp.inexact):
        canonical: np.dtype = _jax.canonical_dtype(dtype)
        return canonical
    real: np.dtype = jnp.finfo(precision).dtype  # of a complex one, its parts'
    if not jnp.issubdtype(dtype, jnp.complexfloating):
        return real
    complexed: np.dtype = jnp.result_type(real, np.complex64)
    return complexed


def with_axes(operands: Sequence[jax.Array], n: int) -> list[jax.Array]:
    """The operands with `n` axes each; axes of length 1 are put in front."""
    return [expanded(array, n - np.ndim(array)) for array in operands]


def expanded(array: Any, n: int) -> Any:
    """The array with `n` axes of length 1 in front."""
    if n == 0:
        return array
    ones = (1,) * n
    return jnp.reshape(array, ones + np.shape(array))


_SCALARS = {"b": False, "i": 0, "u": 0, "f": 0.0, "c": 0j}


def aval_of(leaf: Tree) -> Tree:
    """A ShapeDtypeStruct for an array; other leaves themselves."""
    if isinstance(leaf, jax.Array):
        return _aval_of_array(leaf)
    if is_array_like(leaf):
        dtype = _jax.canonical_dtype(np.result_type(leaf))
        # By the type itself: np.float64 is a Python float, and is strongly typed.
        weak = type(leaf) in NUMBERS
        return struct(np.shape(leaf), dtype, weak)
    return leaf


def _aval_of_array(array: jax.Array) -> jax.ShapeDtypeStruct:
    aval = _jax.aval_of(array)
    return struct(aval.shape, aval.dtype, aval.weak_type)


def avals_of(args: Trees) -> Trees:
    """The arguments with a ShapeDtypeStruct for each array; or the same, if they are
    such already.
    """
    return tuple([_aval_or_tree(arg) for arg in args])


def _aval_or_tree(arg: Tree) -> Tree:
    if isinstance(arg, jax.Array):  # as nearly always; JAX's trees take longer
        return _aval_of_array(arg)
    if isinstance(arg, jax.ShapeDtypeStruct):
        return arg
    return tree.tree_map(aval_of, arg)


def struct(
    shape: tuple[Any, ...], dtype: Any, weak_type: bool = False
) -> jax.ShapeDtypeStruct:
    """A ShapeDtypeStruct. Making one takes 2 us, so that those of numbers are kept."""
    for size in shape:
        # A symbolic size belongs to the scope of one export, which a cache would keep.
        if type(size) is not int:
            return jax.ShapeDtypeStruct(shape, dtype, weak_type=weak_type)
    return _kept_struct(shape, dtype, weak_type)


@functools.lru_cache(maxsize=1024)
def _kept_struct(
    shape: tuple[int, ...], dtype: Any, weak_type: bool
) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, weak_type=weak_type)


def is_aval(leaf: Tree) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def varies(result: Tree) -> bool:
    """Whether `result=` is no spec, but something that gives one."""
    if result is ... or isinstance(result, (str, OfArguments)):
        return True
    # Classes and arrays may be callable, and stand for a dtype or for themselves.
    is_function = callable(result) and not isinstance(result, type)
    return is_function and not hasattr(result, "shape")


def spec_of(result: Tree, args: Trees, name: str) -> Tree:
    """The spec that a rule or a function as `result=` gives for these arguments, or for
    their avals.
    """
    avals = avals_of(args)
    if isinstance(result, OfArguments):
        return result.spec(avals, name)
    try:
        return result(*avals)
    except SpecError:  # a bridge's, which says all
        raise
    except Exception as error:
        arguments = ", ".join(map(_short, avals))
        raise SpecError(
            f"hostcall: the result= function of `{name}` failed for ({arguments}):"
            f" {type(error).__name__}: {error}. It gets a ShapeDtypeStruct for each"
            " array, and should return what result= of hc.call may be",
            code="hc-result-spec",
        ) from error


def shown(result: Tree) -> str:
    """What `result=` says, as `repr` of a host function shows it; "" for nothing."""
    if isinstance(result, OfArguments):
        return result._shown()
    if isinstance(result, str):
        return f"-> {result!r}"
    if result is elementwise:
        return "-> elementwise"
    if varies(result) or not tree.tree_leaves(result):  # a function, or nothing
        return ""
    # Each leaf is a text by now, which Python would show in quotes.
    shapes = tree.tree_map(_short, result)
    return f"-> {shapes}".replace("'", "")


def core_axes(result: Tree, axes: Sequence[int]) -> tuple[int, ...] | None:
    """For each argument, how many of its last axes belong to one item, if the axes in
    front of those broadcast. None if `result=` says nothing of items.

    `axes` are how many axes each argument has.
    """
    if result is elementwise:  # an item is a number
        return (0,) * len(axes)
    if isinstance(result, OfArguments):
        return result._core_axes(axes)
    return None


def lines_up(result: Tree, axes: Sequence[int]) -> bool:
    """Whether a batch may stand in front of arguments with so many axes, if `result=`
    says what an item is.
    """
    return result is elementwise or result._lines_up(axes)


def is_elementwise(result: Tree) -> bool:
    """Whether an element of the only result depends on one element of each argument."""
    if isinstance(result, OfArguments):
        return result._is_elementwise()
    return result is elementwise


# --- The only arrays of a call --------------------------------------------------------


def arrays_only(
    rule: OfArguments, avals: Trees, name: str, n: int
) -> list[jax.ShapeDtypeStruct]:
    """The arguments that are arrays, of which there must be `n`, since the rule says
    so. Objects without arrays may stand between them.
    """
    if len(avals) == n and all(map(is_aval, avals)):  # as nearly always
        return list(avals)
    rule_words = rule._of_arrays()
    arrays: list[jax.ShapeDtypeStruct] = []
    for number, aval in enumerate(avals):
        if is_aval(aval):
            arrays.append(aval)
        elif any(map(is_aval, tree.tree_leaves(aval))):
            raise SpecError(
                f"hostcall: argument {number} of `{name}` is {_short(aval)}, and not"
                f" one array, as {rule_words} takes. Give its arrays one by one, or say"
                " with result= what the function returns",
                code="hc-arguments",
            )
    if len(arrays) != n:
        raise SpecError(
            f"hostcall: `{name}` is {rule_words} of {counted(n, 'array')}, and was"
            f" called with {len(arrays)}. Give one for each",
            code="hc-arguments",
        )
    return arrays


def _short(arg: Tree) -> str:
    """An argument for a message: the dtypes and shapes of its arrays."""
    if hasattr(arg, "shape") and hasattr(arg, "dtype"):
        return f"{arg.dtype}{list(arg.shape)}"
    is_leaf = tree.tree_leaves(arg) == [arg]
    if is_leaf:
        return str(arg)
    return str(tree.tree_map(_short, arg))
