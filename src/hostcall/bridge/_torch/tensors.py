"""Arrays of the host as tensors, and back, without a copy where that is safe.

A tensor over lent memory has three hazards:

  * `fn` keeps it. Its DLPack capsule holds the array, so the engine sees that the array
    is still alive after the call, and raises.
  * `fn` returns it, or a view of it. The engine copies results before it takes the
    memory back.
  * `fn` writes to it. torch ignores DLPack's read-only flag, so functions that write
    get copies (`function` finds them). As a check, `check_unwritten` looks after each
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

# NumPy's DLPack can't name these dtypes, so they are handed over as integers.
_EIGHT_BITS = "e4m3fn e4m3fnuz e5m2 e5m2fnuz e8m0fnu"
_BITS: dict[Any, tuple[Any, torch.dtype]] = {
    np.dtype(getattr(ml_dtypes, name)): (np.dtype(bits), getattr(torch, name))
    for name, bits in [
        ("bfloat16", "uint16"),
        *((f"float8_{form}", "uint8") for form in _EIGHT_BITS.split()),
    ]
    if hasattr(torch, name) and hasattr(ml_dtypes, name)
}
_FROM_BITS: dict[torch.dtype, tuple[torch.dtype, Any]] = {
    theirs: (getattr(torch, bits.name), ours) for ours, (bits, theirs) in _BITS.items()
}
_SAME_NAMES = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64"
    " float16 float32 float64 complex64 complex128"
)
TORCH_DTYPES: dict[Any, torch.dtype] = {
    **{ours: theirs for ours, (_, theirs) in _BITS.items()},
    **{np.dtype(name): getattr(torch, name) for name in _SAME_NAMES.split()},
}
NUMPY_DTYPES: dict[torch.dtype, Any] = {v: k for k, v in TORCH_DTYPES.items()}


def _takes_read_only() -> bool:
    array = np.zeros(1, np.float32)
    array.setflags(write=False)
    try:
        from_dlpack(array.__dlpack__(max_version=_VERSION))
    except (TypeError, RuntimeError, BufferError):  # NumPy or torch is older
        return False
    return True


_LENDS = _takes_read_only()


def tensor(array: np.ndarray) -> torch.Tensor:
    """A tensor over the array's memory, even if that is read-only."""
    if array.dtype.isbuiltin != 1:
        if array.dtype not in _BITS:
            raise SpecError(no_such_dtype(array.dtype))
        bits, dtype = _BITS[array.dtype]
        return tensor(array.view(bits)).view(dtype)
    if _LENDS:
        return from_dlpack(array.__dlpack__(max_version=_VERSION))  # type: ignore[no-any-return]
    return torch.from_numpy(array if array.flags.writeable else array.copy())  # type: ignore[no-any-return]


def own_tensor(array: np.ndarray) -> torch.Tensor:
    """A tensor that may be kept and written to: lent arrays are copied."""
    return tensor(array if array.flags.writeable else array.copy())


def no_such_dtype(dtype: Any) -> str:
    return (
        f"hostcall: torch has no tensors of {dtype}. Convert the argument before the"
        " call: x.astype('int8'), x.astype('float32')"
    )


def array(leaf: Any) -> Any:
    """A tensor as an array over its memory; any other leaf as it is."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.requires_grad:
        leaf = leaf.detach()
    as_bits = _FROM_BITS.get(leaf.dtype)
    if as_bits is not None:
        bits, dtype = as_bits
        return leaf.cpu().contiguous().view(bits).numpy().view(dtype)
    if leaf.is_cpu and not leaf.is_complex() and not leaf.is_neg():
        return leaf.numpy()
    return leaf.cpu().resolve_conj().resolve_neg().numpy()


def check_unwritten(tensors: list[torch.Tensor], name: str) -> None:
    """Raises if a call wrote to tensors that it was lent; versions count writes."""
    for number, lent in enumerate(tensors):
        if lent._version:
            raise ResultError(
                f"hostcall: `{name}` wrote to its array argument {number} in place, but"
                " did not when its shapes were found, so it was lent the program's own"
                " memory, which is now changed. A function must do the same each time:"
                " write x = x.clone() first, or pass lend=False to hc.bridge.torch"
            )
