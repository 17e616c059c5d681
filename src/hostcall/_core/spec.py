"""Flattens what the user wrote (pytrees of anything) to what a primitive takes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from hostcall import _jax
from hostcall._core.array_values import (
    NUMBERS,
    Array,
    canonical,
    first_true,
    is_array_like,
    is_numeric,
    overflowed,
)
from hostcall._core.errors import SpecError
from hostcall._core.host_code import OfArguments
from hostcall._jax.types import Aval, KeyDtype, TreeDef

tree = jax.tree_util

# The dtype of a typed PRNG key; None for any other array.
Key: TypeAlias = KeyDtype | None

# Stands for any leaf. A pytree class that looks at its children may refuse numbers.
_LEAF = object()


class Opaque:
    """A leaf that isn't an array. The function gets the object itself.

    Hashable objects compare by equality, others by identity. Tracing the same call
    again therefore finds the program that was compiled for it.
    """

    __slots__ = ("_hash", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        try:
            self._hash = hash(value)
        except TypeError:  # it has no hash, and so is equal to itself alone
            self._hash = id(value)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, leaf: object) -> bool:
        if not isinstance(leaf, Opaque):
            return NotImplemented
        if self.value is leaf.value:
            return True
        # Of an unhashable object the hash is its identity, so no other has it. And
        # 1, True and 1.0 are equal to Python, but make different programs.
        if self._hash != leaf._hash or type(self.value) is not type(leaf.value):
            return False
        return bool(self.value == leaf.value)

    def __repr__(self) -> str:
        return f"Opaque({self.value!r})"


def widened(dtype: np.dtype) -> np.dtype | None:
    """The dtype of arguments with `float64=`; None if that is their own."""
    if not jnp.issubdtype(dtype, jnp.inexact):
        return None
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    wide = np.dtype(np.complex128 if is_complex else np.float64)
    return None if dtype == wide else wide


@dataclass(frozen=True)
class Template:
    """How to rebuild (args, kwargs) from flat arrays.

    Attributes:
        treedef: the structure of (args, kwargs).
        leaves: one entry for each leaf: an `Opaque`, or the dtype of a typed PRNG key,
            or None for any other array.
    """

    treedef: TreeDef
    leaves: tuple[Opaque | Key, ...]

    @functools.cached_property
    def keys(self) -> tuple[Key, ...]:
        """For each array: the key dtype, or None."""
        return tuple([leaf for leaf in self.leaves if not isinstance(leaf, Opaque)])

    @functools.cached_property
    def is_flat(self) -> bool:
        """Whether each array is one positional argument, and there is nothing else."""
        count = len(self.leaves)
        return len(self.keys) == count and self.treedef == _flat(count)

    @classmethod
    def flat(cls, *marks: Opaque | Key) -> Template:
        """A template for positional arrays only; `marks` are its `leaves`."""
        return cls(_flat(len(marks)), marks)

    def unflatten(
        self, values: Sequence[Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) with these values in their places."""
        remaining = iter(values)
        leaves = [
            leaf.value if isinstance(leaf, Opaque) else next(remaining)
            for leaf in self.leaves
        ]
        args, kwargs = self.treedef.unflatten(leaves)
        return args, kwargs

    def paths(self, static: bool = False) -> list[str]:
        """How a reader would write each array, or each `Opaque`: `args[0]['x']`."""
        paths: list[str] = []
        for path, leaf in zip(_paths(self.treedef), self.leaves, strict=True):
            if isinstance(leaf, Opaque) != static:
                continue
            pair, *inner = path  # the tree is the pair (args, kwargs)
            root = "args" if pair.idx == 0 else "kwargs"
            paths.append(root + tree.keystr(tuple(inner)))
        return paths


@functools.lru_cache  # asked in each call
def _flat(n: int) -> TreeDef:
    """The structure of (args, kwargs) for `n` positional arrays."""
    return tree.tree_structure(((0,) * n, {}))


def _paths(treedef: TreeDef) -> list[Any]:
    value = treedef.unflatten([_LEAF] * treedef.num_leaves)
    leaves, _ = tree.tree_flatten_with_path(value)
    return [path for path, _ in leaves]


def wrap_keys(values: Sequence[Any], keys: Sequence[Key]) -> list[Any]:
    """Typed PRNG keys in place of the uint32 blocks that primitives take and give."""
    pairs = zip(values, keys, strict=True)
    return [x if key is None else _jax.wrap_key(x, key) for x, key in pairs]


def flatten_arguments(args: Any, kwargs: Any) -> tuple[list[Array], Template]:
    """The arrays among the leaves, ready to bind, and the template to rebuild all."""
    leaves, treedef = tree.tree_flatten((args, kwargs))
    arrays: list[Array] = []
    marks: list[Opaque | Key] = []
    for leaf in leaves:
        # Else a Ref is no jax.Array, and comes to `canonical` below.
        if _jax.TRACED_REFS_ARE_ARRAYS and _jax.is_ref(leaf):
            canonical(leaf)  # which refuses it
        if isinstance(leaf, jax.Array):
            is_plain = isinstance(leaf.dtype, np.dtype)  # as nearly always
            is_key = not is_plain and _jax.is_key_dtype(leaf.dtype)
            marks.append(leaf.dtype if is_key else None)
            # Primitives take no keys: XLA knows their blocks of uint32 alone.
            arrays.append(jax.random.key_data(leaf) if is_key else leaf)
        elif is_array_like(leaf):
            marks.append(None)
            arrays.append(canonical(leaf))
        else:
            marks.append(Opaque(leaf))
    if len(arrays) == len(marks) and not any(marks) and treedef == _flat(len(marks)):
        return arrays, _plain_template(len(marks))
    return arrays, Template(treedef, tuple(marks))


@functools.lru_cache  # most calls have arrays only: eager ones then ask nothing anew
def _plain_template(n: int) -> Template:
    return Template.flat(*(None,) * n)


@dataclass(frozen=True)
class Results:
    """What `result=` declares.

    Attributes:
        treedef: the structure of the result.
        avals: the primitive's results, one for each leaf; a key is its uint32 block.
        keys: for each leaf the key dtype, or None.
    """

    treedef: TreeDef
    avals: tuple[Aval, ...]
    keys: tuple[Key, ...]

    @classmethod
    def flat(cls, avals: Sequence[Aval], keys: Sequence[Key] | None = None) -> Results:
        """A tuple of arrays; `keys` as above, or None if no leaf is a key."""
        structure = tree.tree_structure((0,) * len(avals))
        return cls(structure, tuple(avals), tuple(keys or (None,) * len(avals)))

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """The result with these leaves; a key is given as its uint32 block."""
        if any(self.keys):
            leaves = wrap_keys(leaves, self.keys)
        return self.treedef.unflatten(leaves)

    def paths(self) -> list[str]:
        """How a reader would write each leaf: `result[0]['x']`."""
        return ["result" + tree.keystr(path) for path in _paths(self.treedef)]


def parse_result(result: Any, name: str) -> Results:
    """Reads `result=`: a pytree of anything with a shape and a dtype.

    Python's numbers may be leaves too. They declare scalars of the dtype that they have
    as arguments of a jitted function.
    """

    def wrong(fault: str, code: str = "hc-result-spec") -> SpecError:
        leaves_with_paths, _ = tree.tree_flatten_with_path(result)
        # The leaf that is being read: those in front of it have their avals.
        path, _ = leaves_with_paths[len(avals)]
        words = f"result{tree.keystr(path)} of `{name}`"
        return SpecError(f"hostcall: {words} {fault}", code=code)

    if (
        type(result) is jax.ShapeDtypeStruct  # in most eager calls
        and result.dtype in _ALWAYS
        and all(type(size) is int and size >= 0 for size in result.shape)
    ):
        return _one_array(result.shape, result.dtype)
    leaves, treedef = tree.tree_flatten(result)
    avals: list[Aval] = []
    keys: list[Key] = []
    for leaf in leaves:
        # np.float64 is a float too, and has a shape and a dtype.
        if isinstance(leaf, NUMBERS) and not isinstance(leaf, np.generic):
            leaf = _jax.ShapedArray((), jnp.result_type(leaf))
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise wrong(_without_shape(leaf))
        try:
            shape = tuple(leaf.shape)
        except TypeError:  # one size, or nothing
            shape = (None,)
        for size in shape:
            if isinstance(size, (int, np.integer)) and size >= 0:
                continue
            if not _jax.is_symbolic(size):
                raise wrong(
                    f"has the shape {leaf.shape}. Sizes must be integers of at least 0"
                    " that are known when the program is traced"
                )
        dtype = leaf.dtype
        key = None
        # What is not among these takes some microseconds, and depends on JAX's mode.
        if not isinstance(dtype, np.dtype) or dtype not in _ALWAYS:
            dtype, key = _parse_dtype(dtype, wrong)
        block = () if key is None else _jax.key_data_shape(key)
        avals.append(_jax.ShapedArray(shape + block, dtype))
        keys.append(key)
    return Results(treedef, tuple(avals), tuple(keys))


_ONE = tree.tree_structure(0)


@functools.lru_cache(maxsize=1024)
def _one_array(shape: tuple[int, ...], dtype: np.dtype) -> Results:
    return Results(_ONE, (_jax.ShapedArray(shape, dtype),), (None,))


def _without_shape(leaf: object) -> str:
    instead = (
        "Write jax.ShapeDtypeStruct(shape, dtype), or give an array of that shape and"
        " dtype"
    )
    if issubclass(type(leaf), OfArguments):
        instead = (
            "It is only for the whole result. In a tree give the argument itself, or"
            " jax.ShapeDtypeStruct(shape, dtype), or write a function:"
            " result=lambda x, y: (x, y)"
        )
    return f"is {leaf!r}, which has no shape and dtype. {instead}"


# The dtypes that are JAX's own whatever its settings are. Most results have them.
_ALWAYS = frozenset(map(np.dtype, (np.bool_, np.int32, np.float32)))


def _parse_dtype(
    declared: Any, wrong: Callable[..., SpecError]
) -> tuple[np.dtype, Key]:
    """The dtype of the primitive's result, and that of a typed PRNG key.

    `wrong` makes the error of a fault in words.
    """
    try:
        if _jax.is_key_dtype(declared):
            return np.dtype(np.uint32), declared
        dtype = np.dtype(declared)
    except TypeError as error:
        raise wrong(
            f"has the dtype {declared!r}, which NumPy does not know. Write one such as"
            " np.float32"
        ) from error
    # What the function returns is stored in the machine's own byte order.
    if dtype.kind in "iufc" and not dtype.isnative:
        dtype = np.dtype(dtype.type)
    if not is_numeric(dtype) or dtype.type in (np.longdouble, np.clongdouble):
        raise wrong(
            f"is {dtype}, which JAX arrays can't have. Declare a numeric dtype, or keep"
            " Python objects on the host with hc.Object"
        )
    kept_by_jax = _jax.canonical_dtype(dtype)
    if kept_by_jax != dtype:
        raise wrong(
            f"is {dtype}, but JAX is in 32-bit mode. Declare {kept_by_jax}, or enable"
            ' 64-bit types with jax.config.update("jax_enable_x64", True)',
            "hc-32-bit",
        )
    return dtype, None


def parse_fill(fill: Any, results: Results, name: str) -> tuple[bytes | None, ...]:
    """The bytes of each result where the mask `where` is False; None means zeros.

    `fill` is a scalar for all leaves, or a pytree like the result; each of its leaves
    is broadcast to the shape of the result's leaf. If that is symbolic, the leaf must
    be a scalar, and its bytes are those of one element.
    """
    if fill is None:
        return (None,) * len(results.avals)
    try:
        leaves = results.treedef.flatten_up_to(fill)
    except ValueError:  # no tree like the result: one number for all leaves
        leaves = [fill] * len(results.avals)
    fills: list[bytes] = []
    for leaf, aval, path in zip(leaves, results.avals, results.paths(), strict=True):
        if isinstance(leaf, jax.core.Tracer):
            raise SpecError(
                f"hostcall: fill= of `{name}` is traced, but it must be a constant of"
                " the program. Pass numbers, or choose with jnp.where after the call",
                code="hc-traced",
            )
        try:
            array = _converted(leaf, aval)
        except (TypeError, ValueError, OverflowError) as error:
            raise SpecError(
                f"hostcall: fill= of `{name}` is {leaf!r} for {path}, which can't be"
                f" converted to {aval.dtype}{list(aval.shape)}: {error}",
                code="hc-option",
            ) from None
        fills.append(array.tobytes())
    return tuple(fills)


def _converted(leaf: Any, aval: Aval) -> np.ndarray:
    """A fill as an array of this aval.

    Raises:
        OverflowError, TypeError, ValueError: it can't be one.
    """
    number = np.asarray(leaf)
    with np.errstate(over="ignore"):  # what is lost is told below
        fill = number.astype(aval.dtype)
    _refuse_lossy(number, fill)
    # Of a symbolic shape, one element: the plan repeats it for the real sizes.
    shape = () if _jax.has_symbolic([aval]) else aval.shape
    return np.broadcast_to(fill, shape)


def _refuse_lossy(number: np.ndarray, fill: np.ndarray) -> None:
    """Raises OverflowError if the dtype of `fill` can't hold one of these numbers."""
    lost = None
    if number.dtype.kind in "iu" and jnp.issubdtype(fill.dtype, np.integer):
        # As Python's integers, since int64 and uint64 are compared as floats.
        changed = np.zeros(number.shape, bool)
        changed[...] = number.astype(object) != fill.astype(object)
        lost = first_true(changed)
    elif number.dtype.kind in "fc" and jnp.issubdtype(fill.dtype, np.inexact):
        lost = overflowed(number, fill)
    if lost is not None:
        raise OverflowError(f"it would become {fill[lost]}")


@functools.cache
def packed_bits(dtype: np.dtype) -> tuple[int, bool]:
    """(bits, signed) for elements that XLA packs into bytes; (0, False) for others."""
    if dtype == jax.dtypes.float0:  # which has no bits, and is a bool to XLA
        return 0, False
    bits = jax.dtypes.itemsize_bits(dtype)
    if bits not in (2, 4):  # XLA gives 6 bits a byte of their own
        return 0, False
    return bits, dtype.name.startswith("int")
