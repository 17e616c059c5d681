"""JAX's dtypes, values of each, and a comparison of arrays by their bits."""

import jax.numpy as jnp
import numpy as np

WIDE = ("int64", "uint64", "float64", "complex128")
SMALL = ("int2", "int4", "uint2", "uint4", "float4_e2m1fn")
DTYPES = (
    "bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16",
    "bfloat16", "float32", "complex64", "float8_e3m4", "float8_e4m3",
    "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu", *SMALL, *WIDE,
)  # fmt: skip


def values(dtype, shape, seed=0):
    """Values that cover the bit patterns of a dtype."""
    random = np.random.default_rng(seed)
    dtype = np.dtype(getattr(jnp, dtype))
    if dtype == np.bool_:
        return random.integers(0, 2, shape).astype(bool)
    if dtype.name in ("int2", "int4"):
        high = 2 ** (int(dtype.name[3:]) - 1)
        return random.integers(-high, high, shape, np.int8).astype(dtype)
    if dtype.name in SMALL:
        high = 4 if dtype.name == "uint2" else 16
        return random.integers(0, high, shape, np.uint8).view(dtype)
    count = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer(random.bytes(count), dtype).reshape(shape).copy()


def same(a, b):
    """Asserts that two arrays have the same dtype, shape and bits.

    Compares bits, so that NaNs compare equal. Small signed integers are compared as
    int8, since the unused bits of their bytes may differ.
    """
    a, b = np.asarray(a), np.asarray(b)
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    if a.dtype.name in ("int2", "int4"):
        a, b = a.astype(np.int8), b.astype(np.int8)
    assert a.tobytes() == b.tobytes()
