"""What counts as an array of numbers, and what JAX makes of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from hostcall import _jax
from hostcall._core.errors import SpecError

Array: TypeAlias = jax.Array | np.ndarray

NUMBERS = (bool, int, float, complex)  # Python's own


def is_array_like(leaf: object) -> bool:
    """Whether JAX would accept this leaf as an array. Others become `Opaque`."""
    if isinstance(leaf, _jax.NUMPY_ARRAYS):
        return is_numeric(leaf.dtype)
    return isinstance(leaf, NUMBERS) or hasattr(leaf, "__jax_array__")


# JAX's dtypes beside NumPy's.
_MORE_DTYPES = frozenset(vars(ml_dtypes))


def is_numeric(dtype: np.dtype) -> bool:
    """Whether arrays of this dtype hold numbers, JAX's extra dtypes included."""
    return dtype.kind in "biufc" or dtype.name in _MORE_DTYPES


def overflowed(array: np.ndarray, cast: np.ndarray) -> tuple[np.intp, ...] | None:
    """The place of the first finite number that a conversion made infinite or NaN."""
    if np.isfinite(cast).all():  # as nearly always
        return None
    pairs = [(array, cast)]
    if jnp.issubdtype(cast.dtype, np.complexfloating):
        # A number with one infinite part counts as infinite, whatever the other one is.
        pairs = [(array.real, cast.real), (array.imag, cast.imag)]
    lost = np.zeros(array.shape, bool)
    for number, converted in pairs:
        lost |= np.isfinite(number) & ~np.isfinite(converted)
    return first_true(lost)


def first_true(flags: np.ndarray) -> tuple[np.intp, ...] | None:
    """The index of the first element that is True; None if there is none."""
    if not flags.any():
        return None
    return np.unravel_index(np.argmax(flags), flags.shape)


def canonical(leaf: Any) -> Array:
    """`leaf` as an array of the dtype that JAX will give it.

    Raises:
        SpecError: if that would change a value or drop a mask.
    """
    if _jax.is_ref(leaf):
        raise SpecError(
            "hostcall: an argument is a Ref of JAX, which host code can't read."
            " Pass its value, ref[...]; what the call returns can go back: ref[...] ="
            " hc.call(fn, result, ref[...])",
            code="hc-arguments",
        )
    if hasattr(leaf, "__jax_array__"):
        return leaf.__jax_array__()  # type: ignore[no-any-return]
    if isinstance(leaf, np.ma.MaskedArray) and np.ma.is_masked(leaf):
        raise SpecError(
            f"hostcall: an argument is {masked(leaf)}. Pass np.ma.filled(x, number), or"
            " also pass the mask (np.ma.getmaskarray(x))"
        )
    if isinstance(leaf, int) and not isinstance(leaf, bool):
        # NumPy would make objects of one that no int64 holds.
        dtype = _jax.canonical_dtype(np.int64)
        _refuse_lost((leaf,), "int", dtype)
        return np.asarray(leaf, dtype)
    array = np.asarray(leaf)
    if not array.dtype.isnative:  # big-endian, as some file formats have it
        array = array.astype(np.dtype(array.dtype.type))
    dtype = _jax.canonical_dtype(array.dtype)
    # The conversion below would wrap around. If both ends fit, all between do.
    if dtype != array.dtype and array.dtype.kind in "iu" and array.size:
        _refuse_lost((array.min(), array.max()), array.dtype, dtype)
    return np.asarray(array, dtype)


def masked(array: np.ma.MaskedArray[Any, Any]) -> str:
    """What messages say of a masked array, which would silently lose its mask."""
    return (
        f"a masked array with {np.ma.count_masked(array)} of {array.size} elements"
        " masked, and JAX's arrays have no masks"
    )


def _refuse_lost(ends: Sequence[int], have: object, dtype: np.dtype) -> None:
    """Refuses integers, the least and the largest, that a dtype can't hold."""
    for value in ends:
        if not np.iinfo(dtype).min <= value <= np.iinfo(dtype).max:
            raise SpecError(
                f"hostcall: an argument holds {value} ({have}), which {dtype} can't"
                " hold, and JAX is in 32-bit mode. Enable 64-bit types with"
                ' jax.config.update("jax_enable_x64", True), or wrap the value in an'
                " object of your own class, which the function gets unchanged",
                code="hc-32-bit",
            )
