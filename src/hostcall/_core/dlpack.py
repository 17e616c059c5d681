"""The array type that a callback gets with arrays="dlpack"."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np


class DLPackArray:
    """An array in host memory that any DLPack consumer can take without a copy.

    NumPy exports only its own dtypes by DLPack. This class also exports bfloat16, the
    float8 dtypes and the rest of JAX's.

    Attributes:
        shape: the sizes of its dimensions.
        dtype: the NumPy dtype of its elements.
    """

    __slots__ = ("_array",)

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def to_numpy(self) -> np.ndarray:
        """A copy as a NumPy array."""
        return self._array.copy()

    @property
    def shape(self) -> tuple[int, ...]:
        return self._array.shape

    @property
    def dtype(self) -> np.dtype:
        return self._array.dtype

    def __dlpack__(self, **options: Any) -> Any:
        if self._array.dtype.isbuiltin == 1:
            return self._array.__dlpack__(**options)
        return jnp.asarray(self._array).__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)  # kDLCPU

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self._array, dtype=dtype, copy=copy)

    def __repr__(self) -> str:
        return f"DLPackArray(dtype={self.dtype}, shape={self.shape})"
