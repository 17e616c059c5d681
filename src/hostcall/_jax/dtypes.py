"""JAX's dtypes: typed keys, float0, the x64 setting; and arrays as NumPy's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax._src import core as _core
from jax._src import dtypes as _dtypes
from jax._src.lib import guard_lib as _guard_lib

# --- dtypes (_spec, _coerce) -------------------------------------------------------


def is_key_dtype(dtype: Any) -> bool:
    return bool(_dtypes.issubdtype(dtype, jax.dtypes.prng_key))


def canonical_dtype(dtype: Any) -> Any:
    """The dtype that JAX uses for this one with the present x64 setting."""
    return _dtypes.canonicalize_dtype(dtype)


def key_data_shape(dtype: Any) -> tuple[int, ...]:
    """Shape of the uint32 block behind one typed PRNG key."""
    return tuple(dtype._impl.key_shape)


def data_of(array: Any) -> Any:
    """The array itself; of typed keys that of their blocks."""
    return getattr(array, "_base_array", array)


def wrap_key(data: Any, dtype: Any) -> Any:
    return jax.random.wrap_key_data(data, impl=dtype._impl.name)


def physical_avals(avals: Sequence[Any]) -> list[Any]:
    """With the uint32 blocks behind typed keys; float0, as in programs, is bool."""
    return [
        aval.update(dtype=np.dtype(np.bool_)) if aval.dtype == _dtypes.float0 else aval
        for aval in map(_core.physical_aval, avals)
    ]


def to_host(operand: Any) -> np.ndarray:
    """An operand of an eager call, with the dtype that JAX gives it."""
    if isinstance(operand, jax.Array):
        return to_numpy(operand)
    if getattr(operand, "dtype", None) == _dtypes.float0:
        return np.zeros(operand.shape, np.bool_)
    array = np.asarray(operand, _dtypes.canonicalize_dtype(_dtypes.dtype(operand)))
    return np.ascontiguousarray(array).reshape(array.shape)


def to_numpy(array: jax.Array) -> np.ndarray:
    """The values of an array. To JAX's transfer guards it is an explicit transfer, as
    `jax.device_get` is.
    """
    guard = _guard_lib.thread_local_state()
    before = guard.explicit_device_get
    guard.explicit_device_get = True
    try:
        return np.asarray(array)
    finally:
        guard.explicit_device_get = before
