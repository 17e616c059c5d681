"""Arrays of the host as tensors, and back, without a copy where that is safe.

A tensor over lent memory has three hazards:

  * `fn` keeps it. Its DLPack capsule holds the array, so the engine sees that the array
    is still alive after the call, and raises.
  * `fn` returns it, or a view of it. The engine copies results before it takes the
    memory back.
  * `fn` writes to it. torch ignores DLPack's read-only flag, so functions that write
    get copies (`fake_run` finds them). As a check, `check_unwritten` looks after each
    call at the tensors' versions, which count writes.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from hostcall._core.errors import ResultError, SpecError

_VERSION = (1, 0)  # the first version of DLPack that can hand out read-only memory

_NAMES = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64"
    " float16 float32 float64 complex64 complex128 bfloat16 float8_e4m3fn"
    " float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
)
TORCH_DTYPES: dict[np.dtype, torch.dtype] = {
    np.dtype(getattr(ml_dtypes, name, name)): getattr(torch, name)
    for name in _NAMES.split()
    if hasattr(torch, name)
}
NUMPY_DTYPES: dict[torch.dtype, np.dtype] = {v: k for k, v in TORCH_DTYPES.items()}


def _bits(dtype: np.dtype) -> str:
    """The integers as which arrays of ml_dtypes are handed over, as NumPy's DLPack has
    no names for their dtypes; "" for NumPy's own.
    """
    return "" if dtype.isbuiltin == 1 else f"uint{8 * dtype.itemsize}"


def tensor(array: np.ndarray) -> torch.Tensor:
    """A tensor over the array's memory, even if that is read-only."""
    bits = _bits(array.dtype)
    if bits:
        return tensor(array.view(bits)).view(torch_dtype(array.dtype))
    try:
        return from_dlpack(array.__dlpack__(max_version=_VERSION))  # type: ignore[no-any-return]
    except (TypeError, RuntimeError, BufferError):  # NumPy or torch is older
        return torch.from_numpy(_writeable(array))  # type: ignore[no-any-return]


def own_tensor(array: np.ndarray) -> torch.Tensor:
    """A tensor that may be kept and written to: lent arrays are copied."""
    return tensor(_writeable(array))


def _writeable(array: np.ndarray) -> np.ndarray:
    """The array, or a copy of one that is lent, which are read-only."""
    return array if array.flags.writeable else array.copy()


def torch_dtype(dtype: np.dtype) -> torch.dtype:
    if dtype not in TORCH_DTYPES:
        raise SpecError(
            f"hostcall: torch has no tensors of {dtype}. Convert the argument before"
            " the call: x.astype('int8'), x.astype('float32')",
            code="hc-result-spec",
        )
    return TORCH_DTYPES[dtype]


def array(leaf: Any) -> Any:
    """A tensor as an array over its memory; any other leaf as it is."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.requires_grad:  # NumPy would refuse it
        leaf = leaf.detach()
    dtype = NUMPY_DTYPES.get(leaf.dtype)
    bits = "" if dtype is None else _bits(dtype)
    if bits:
        integers = leaf.cpu().contiguous().view(getattr(torch, bits))
        return integers.numpy().view(dtype)
    if leaf.is_cpu and not leaf.is_complex() and not leaf.is_neg():
        return leaf.numpy()
    # torch conjugates and negates by a flag of the tensor, which NumPy does not know.
    return leaf.cpu().resolve_conj().resolve_neg().numpy()


def check_unwritten(leaves: list[object], name: str) -> None:
    """Raises if a call wrote to tensors that it was lent; versions count writes."""
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    for number, lent in enumerate(tensors):
        if lent._version:
            raise ResultError(
                f"hostcall: `{name}` wrote to its array argument {number} in place, but"
                " did not when its shapes were found, so it was lent the program's own"
                " memory, which is now changed. A function must do the same each time:"
                " write x = x.clone() first, or pass lend=False to hc.bridge.torch"
            )
