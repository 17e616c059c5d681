"""JAX's dtypes (typed keys, float0, the x64 setting), and symbolic sizes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import jax
import numpy as np

from hostcall._jax.door import core as _core
from hostcall._jax.types import Aval, Dtype


def is_key_dtype(dtype: Dtype) -> bool:
    plain = isinstance(dtype, np.dtype)  # most are
    return not plain and bool(jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key))


def is_smaller_than_a_byte(dtype: Dtype) -> bool:
    """Whether an element has less than eight bits, as those of int4 have."""
    if jax.dtypes.issubdtype(dtype, np.integer):
        return bool(jax.numpy.iinfo(dtype).bits < 8)
    if jax.dtypes.issubdtype(dtype, np.floating):
        return bool(jax.numpy.finfo(dtype).bits < 8)
    return False


_REFS = (jax.core.Tracer, jax.Ref)


def is_ref(value: object) -> bool:
    """Whether this is a mutable array (`jax.new_ref`), traced or not."""
    return isinstance(value, _REFS) and type(value.aval) is jax.ref.AbstractRef


# The dtype that JAX uses for this one under the current x64 setting.
canonical_dtype = jax.dtypes.canonicalize_dtype


# The dtypes that JAX makes narrow in 32-bit mode, wherever it takes or makes an array.
WIDE_DTYPES = frozenset(map(np.dtype, (np.int64, np.uint64, np.float64, np.complex128)))


def able_to_hold(*dtypes: Dtype | None) -> contextlib.AbstractContextManager[object]:
    """Code in this block can make arrays of these dtypes, also in 32-bit mode.

    An array keeps its 64 bits after the mode in which it was made has ended, and so do
    the avals of what is computed from it. What hostcall makes for an aval has the
    aval's dtype, whatever the mode is then.
    """
    if jax.config.jax_enable_x64 or WIDE_DTYPES.isdisjoint(dtypes):
        return contextlib.nullcontext()
    wide: contextlib.AbstractContextManager[object] = jax.enable_x64(True)
    return wide


def key_data_shape(dtype: Dtype) -> tuple[int, ...]:
    """The shape of the uint32 block that represents one typed PRNG key."""
    return tuple(dtype._impl.key_shape)


def key_implementation(dtype: Dtype) -> str:
    """The name of a typed key's implementation, as `jax.random.key(impl=)` takes it."""
    return str(dtype._impl.name)


def data_of(array: jax.Array) -> jax.Array:
    """The array itself, or for an array of typed keys the uint32 array behind it."""
    return array._base_array if is_key_dtype(array.dtype) else array


def wrap_key(data: jax.Array | np.ndarray, dtype: Dtype) -> jax.Array:
    return jax.random.wrap_key_data(data, impl=dtype._impl.name)


def physical_avals(avals: Sequence[Aval]) -> list[Aval]:
    """The avals as compiled programs have them.

    A typed key becomes its uint32 block, and float0 becomes bool.
    """
    physical: list[Aval] = []
    for aval in map(_core.physical_aval, avals):
        if aval.dtype == jax.dtypes.float0:
            aval = aval.update(dtype=np.dtype(np.bool_))
        physical.append(aval)
    return physical


def is_symbolic(size: object) -> bool:
    return bool(jax.export.is_symbolic_dim(size))


def has_symbolic(avals: Sequence[Aval]) -> bool:
    """Whether some of these shapes are symbolic. A token has no shape."""
    for aval in avals:
        if aval is not _core.abstract_token and any(map(is_symbolic, aval.shape)):
            return True
    return False
