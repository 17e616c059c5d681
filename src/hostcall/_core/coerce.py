"""Converts what a function returned to the arrays that its `result=` declares."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from hostcall import _jax
from hostcall._core.array_values import NUMBERS, is_numeric, masked, overflowed
from hostcall._core.errors import ResultError, counted
from hostcall._core.spec import Key
from hostcall._jax.types import Aval, TreeDef


def take_apart(
    value: Any, treedef: TreeDef, name: str, avals: Sequence[Aval] = ()
) -> list[Any]:
    """The leaves of a return value, which must have the structure of `result=`.

    `avals` are those that `result=` declares, for messages.
    """
    try:
        return list(treedef.flatten_up_to(value))
    except (ValueError, TypeError) as error:
        try:
            got = _words(jax.tree_util.tree_structure(value))
        except (ValueError, TypeError) as why:  # keys of a dict that can't be sorted
            got = f"{_short(value)}, which is no pytree ({why})"
        hint = _CHANGE
        if value is None:
            hint = _RETURN
        elif treedef.num_leaves == 0:
            hint = "The call has result=None: return nothing, or declare the result"
        hint = _unawaited(value) or _a_shape(value, treedef, avals) or hint
        raise ResultError(
            f"hostcall: `{name}` returned a structure that differs from its result=."
            f" Expected {_words(treedef)}, got {got}. {hint}"
        ) from error


def _words(treedef: TreeDef) -> str:
    return str(treedef).removeprefix("PyTreeDef(").removesuffix(")")


_RETURN = "Does the function lack a `return`?"
_CHANGE = "Change what the function returns, or what result= declares"

Shape: TypeAlias = tuple[int, ...]
Words: TypeAlias = Callable[[], str]
Hint: TypeAlias = Callable[[Shape], str] | None


def coerce(
    value: Any,
    dtype: np.dtype,
    shape: Shape,
    which: Words,
    hint: Hint = None,
    key: Key = None,
) -> np.ndarray:
    """`value` as a row-major array of this dtype and shape.

    Accepts NumPy arrays and scalars, Python numbers, nested lists, memoryviews,
    jax.Arrays (typed keys become uint32 blocks), and any object with `__array__` or
    `__dlpack__`. Never changes an integer silently, and never drops a mask: a masked
    array is accepted only if no element is masked.

    Args:
        value: a leaf of what the function returned.
        dtype: the dtype that the leaf should have.
        shape: the shape that the leaf should have.
        which: returns the leaf's path and the function's name, for messages.
        hint: says what may be wrong with another shape; "" for the usual words.
        key: the dtype of the typed keys that are wanted; then `dtype` and `shape` are
            those of their blocks.

    Raises:
        ResultError: if the shape differs, the dtype can't be converted, the value is
            not an array of numbers, or elements are masked.
    """
    if isinstance(value, jax.Array) and value.dtype == dtype and value.shape == shape:
        array = np.asarray(value)
    else:
        if isinstance(value, jax.Array) and _jax.is_key_dtype(value.dtype):
            _check_keys(value, dtype, shape, which, key)
        array = _coerce(value, dtype, shape, which, hint)
    array = np.ascontiguousarray(array).reshape(shape)
    # Equal dtypes can be different objects (after pickling, with metadata, longlong).
    # The engine compares pointers, so the array must have this very object.
    return array if array.dtype is dtype else array.view(dtype)


def _check_keys(
    keys: jax.Array, dtype: np.dtype, shape: Shape, which: Words, want: Key
) -> None:
    """Refuses typed keys where others are wanted, or numbers that a block is not."""
    got = _named(keys.dtype, keys.shape)
    if want is None:
        if dtype == np.uint32:  # the block itself is declared
            return
        raise ResultError(
            f"hostcall: {which()} should be {_named(dtype, shape)}, got {got}, a PRNG"
            " key, which is no number. Return numbers, or declare the key:"
            " jax.ShapeDtypeStruct(x.shape, x.dtype)",
            code="hc-result-dtype",
        )
    if keys.dtype != want:
        axes = len(shape) - len(_jax.key_data_shape(want))
        raise ResultError(
            f"hostcall: {which()} should be {_named(want, shape[:axes])}, got {got}:"
            " the numbers of a key mean something else in another implementation. Make"
            f" it with jax.random.key(seed, impl={_jax.key_implementation(want)!r}), or"
            " declare the other one",
            code="hc-result-dtype",
        )


def _coerce(
    value: Any, dtype: np.dtype, shape: Shape, which: Words, hint: Hint
) -> np.ndarray:
    """`coerce`, for a value that is not such an array already."""

    def wrong(got: str, code: str | None = None) -> ResultError:
        should = f"{which()} should be {_named(dtype, shape)}"
        return ResultError(f"hostcall: {should}, got {got}", code=code)

    if value is None:
        raise wrong(f"None. {_RETURN}")
    for array_with_mask in _masked_in(value):
        raise wrong(
            f"{masked(array_with_mask)}. Return np.ma.filled(x, number) to give those"
            " elements a value, or return the mask as a separate result"
            " (np.ma.getmaskarray(x))"
        )
    array = _as_numpy(value, which)
    if not is_numeric(array.dtype):
        if unawaited := _unawaited(value):
            raise wrong(f"a coroutine. {unawaited}", "hc-coroutine")
        raise wrong(
            f"{type(value).__name__} {_short(value)}, which is not an array of numbers"
            f" but {_instead(value, array, dtype)}"
        )
    if array.shape != shape:
        advice = (hint and hint(array.shape)) or _shape_hint(array.shape, shape)
        raise wrong(f"{_named(array.dtype, array.shape)}. {advice}")
    if array.dtype == dtype:
        return array
    # Python's own numbers have no width that a conversion could lose.
    is_weak = not hasattr(value, "dtype")
    return _cast(array, dtype, is_weak, which)


def _unawaited(value: object) -> str:
    """What to do about a plain function that returned a coroutine."""
    if not inspect.iscoroutine(value):
        return ""
    value.close()  # or Python warns that it was never awaited
    return (
        "A plain function returned it (a lambda, or a decorator's wrapper), so nothing"
        " awaits it: pass the `async def` function itself, a functools.partial of it,"
        " or an `async def` that awaits it"
    )


_UNREADABLE = (ValueError, TypeError, RuntimeError, BufferError, AttributeError)


def _as_numpy(value: Any, which: Words) -> np.ndarray:
    """What NumPy makes of a value, by the first way that works: of JAX's and torch's
    arrays their own, then NumPy's protocols, then DLPack, at last by JAX.
    """
    if isinstance(value, jax.Array):
        if _jax.is_key_dtype(value.dtype):
            value = jax.random.key_data(value)
        return np.asarray(value)
    if hasattr(value, "requires_grad") and hasattr(value, "detach"):
        value = value.detach()  # a torch tensor that takes part in autograd
    is_numpys = isinstance(value, (np.ndarray, np.generic))
    by_dlpack = not is_numpys and hasattr(value, "__dlpack__")
    try:
        array = np.asarray(value)
        # An object that has nothing but DLPack is one Python object for `asarray`.
        return np.from_dlpack(value) if by_dlpack and array.dtype == "O" else array
    except _UNREADABLE as error:
        fault: Exception = error
    try:
        if by_dlpack:
            # NumPy's protocols don't know this dtype (bfloat16, for one); JAX does.
            return np.asarray(jnp.from_dlpack(value))
    except _UNREADABLE as error:
        fault = error
    try:
        raise ResultError(
            f"hostcall: {which()} is a {type(value).__name__} that NumPy can't read:"
            f" {fault}. {_CHANGE}"
        ) from fault
    finally:  # its traceback refers to this frame, which would keep the value alive
        del fault


def _masked_in(value: object) -> Iterator[np.ma.MaskedArray[Any, Any]]:
    """The arrays with masked elements; `np.asarray` would silently drop the mask."""
    if isinstance(value, (list, tuple)):
        if not {*map(type, value)} <= {*NUMBERS}:  # skip long lists of plain numbers
            for item in value:
                yield from _masked_in(item)
    elif isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        yield value


def _cast(array: np.ndarray, want: np.dtype, weak: bool, which: Words) -> np.ndarray:
    """Converts the elements, or refuses what would change them.

    A kind may become a greater one, in the order bool, integer, float, complex. Of
    integers each must be exact in the other dtype. Floats may get any width, unless one
    would become infinite.
    """
    have = array.dtype
    kind_have = _kind(have)
    kind_want = _kind(want)

    # What to write to convert it as NumPy does; Python's numbers have no `astype`.
    x = "np.asarray(x)" if weak else "x"
    converted = f"{x}.astype('{want}')"

    def wrong(got: str) -> ResultError:
        return ResultError(
            f"hostcall: {which()} should be {want}, got {have}{got}",
            code="hc-result-dtype",
        )

    if _ORDER[kind_have] > _ORDER[kind_want]:
        raise wrong(_narrowing(array, want, weak))
    # Integers: each value must fit.
    if kind_have == kind_want == "integer" and array.size:
        info = ml_dtypes.iinfo(want)
        for end in int(array.min()), int(array.max()):
            if not int(info.min) <= end <= int(info.max):
                raise wrong(
                    f" holding {end}, which {want} can't hold. Declare a wider result,"
                    f" or return {converted} to wrap around"
                )
    with np.errstate(over="ignore"):  # found below, with the value
        cast = array.astype(want)
    # Floats: another width is no mistake, unless a finite number becomes infinite.
    if kind_have != "integer":
        lost = overflowed(array, cast)
        if lost is not None:
            raise wrong(
                f" holding {array[lost]}, which {want} can't hold: it would become"
                f" {cast[lost]}. Scale or clip it, declare a wider result, or return"
                f" {converted} to let it overflow"
            )
    # Integers to floats: 2**24 + 1 has no float32. Python's integers compare exactly.
    may_round = kind_have == "integer" and kind_want != "integer"
    if may_round and not np.array_equal(
        cast.astype(np.complex128), array.astype(object)
    ):
        raise wrong(
            f" with values that {want} can't hold exactly. Return {converted} to round"
        )
    return cast


def _narrowing(array: np.ndarray, want: np.dtype, weak: bool) -> str:
    """What a message says of a conversion to a lesser kind, as float to integer."""
    have = array.dtype
    kind_have = _kind(array.dtype)
    kind_want = _kind(want)
    is_number = weak and array.ndim == 0
    x = "np.asarray(x)" if weak and not is_number else "x"
    if kind_have == "complex":
        x += ".real"
    if is_number:
        meant = {"bool": f"bool({x})", "integer": f"round({x})"}.get(kind_want, x)
    elif kind_have == "complex" and kind_want == "float":
        meant = x  # its real part is that already
    else:
        meant = f"{x}.astype('{want}')"
    source = " from Python numbers" if weak else ""
    return (
        f"{source}. hostcall does not convert {kind_have} to {kind_want} silently:"
        f" return {meant} if that is what you mean, or declare"
        f" {jax.dtypes.canonicalize_dtype(have)}"
    )


_ORDER = {"bool": 0, "integer": 1, "float": 2, "complex": 3}


def _kind(dtype: np.dtype) -> str:
    if dtype == np.bool_:
        return "bool"
    if jnp.issubdtype(dtype, np.integer):
        return "integer"
    return "complex" if jnp.issubdtype(dtype, np.complexfloating) else "float"


# --- What messages say about results that are not what `result=` declares -------------


def _a_shape(value: object, treedef: TreeDef, avals: Sequence[Aval]) -> str:
    """What to write if result= looks like a shape, such as (3,), of this array."""
    n = len(avals)
    if not isinstance(value, (np.ndarray, jax.Array)) or value.ndim != n or n == 0:
        return ""
    structure = jax.tree_util.tree_structure
    if treedef not in (structure((0,) * n), structure([0] * n)):
        return ""
    for aval in avals:
        if aval.shape != () or np.dtype(aval.dtype).kind != "i":
            return ""
    return (
        f"Is result= meant as a shape? It declares {counted(n, 'integer')}. For an"
        f" array write jax.ShapeDtypeStruct({value.shape}, dtype)"
    )


def _instead(value: object, array: np.ndarray, want: np.dtype) -> str:
    """Says what a value that is no numeric array holds, and what to return instead."""
    have = array.dtype
    if have.names:
        fields = ", ".join(map(repr, have.names))
        return (
            f"structured, with the fields {fields}. Return one of them,"
            f" x[{have.names[0]!r}], or declare a result for each"
        )
    if have.kind in "Mm":
        of = "dates" if have.kind == "M" else "durations"
        spans = "(x - x[0])" if have.kind == "M" else "x"
        return f"{of} ({have}). Return seconds, {spans} / np.timedelta64(1, 's')"
    if have.kind == "O" and array.ndim == 0 and isinstance(value, Iterable):
        return f"an iterable. Return np.asarray(list(x), '{want}')"
    if have.kind == "O":
        return f"Python objects. Return np.asarray(x, '{want}') if they are numbers"
    if have.kind == "V":
        return f"bytes ({have}). Return x.view('{want}') if they hold such numbers"
    if isinstance(value, bytes):
        return f"bytes. Return np.frombuffer(x, '{want}') if they hold such numbers"
    return f"strings ({have}). Return np.asarray(x, '{want}') to read them as numbers"


def _named(dtype: object, shape: Shape) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


def _short(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."


def _shape_hint(got: Shape, want: Shape) -> str:
    """What to write if only the shape of a result differs."""
    if want == () and math.prod(got) == 1:
        return "Return x.item() or x.reshape(()) for a scalar"
    longer_axes_of_got = [n for n in got if n != 1]
    longer_axes_of_want = [n for n in want if n != 1]
    if longer_axes_of_got == longer_axes_of_want:
        return f"Return x.reshape({want})"
    return _CHANGE
