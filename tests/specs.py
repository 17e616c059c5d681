"""Descriptions of arrays, and a large one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

N = 1000  # elements


def spec(*shape: int, dtype: Any = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def like(x: Any) -> jax.ShapeDtypeStruct:
    """What describes a value."""
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))


def ramp(start: int = 0) -> Any:
    return np.arange(start, start + N, dtype=np.float32)
