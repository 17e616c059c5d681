"""`hc.call(..., arrays="cuda")`: the function takes and returns arrays on the GPU.

No values go to the host. The arguments are Buffers. Results may lie anywhere on the
GPU; they are copied from there on XLA's stream.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from hostcall import _native
from hostcall._core import coerce, errors
from hostcall._core.host_code import HostCode
from hostcall._core.spec import Opaque, Results


@dataclass(unsafe_hash=True, repr=False)
class OnDevice(HostCode):
    """The user's function as a buffer callback.

    Two of them are equal if their functions and results are, so JAX's caches hit.
    """

    fn: Opaque
    results: Results
    name: str = field(compare=False)

    def __post_init__(self) -> None:
        self.__name__ = self.__qualname__ = self.name

    def inside(self) -> Callable[..., Any]:
        return self.fn.value  # type: ignore[no-any-return]

    def __call__(self, ctx: Any, out: Any, *args: Any, **kwargs: Any) -> None:
        try:
            _ = ctx.stream  # which a program on the CPU has not
        except jax.errors.JaxRuntimeError:
            raise errors.SpecError(
                f"hostcall: `{self.__name__}` has arrays='cuda', and its program runs"
                " on the CPU. Use 'numpy', 'jax' or 'dlpack' there",
                code="hc-device",
            ) from None
        value = self.fn.value(*args, **kwargs)
        treedef = self.results.treedef
        leaves = coerce.take_apart(value, treedef, self.__name__)
        buffers = treedef.flatten_up_to(out)
        paths = self.results.paths()
        for buffer, leaf, path in zip(buffers, leaves, paths, strict=True):
            _store(buffer, leaf, f"{path} of `{self.__name__}`")


def _store(buffer: Any, leaf: Any, path: str) -> None:
    """Copies a result into XLA's memory, which a Buffer stands for.

    If `leaf` says that it was made on XLA's stream, the copy is only enqueued there.
    The owner may then free the memory in stream order, as stream-aware allocators do.
    Otherwise this waits for both streams.
    """
    interface = getattr(leaf, "__cuda_array_interface__", None)
    if interface is None:
        raise errors.ResultError(
            f"hostcall: {path} should be an array on the GPU with"
            " __cuda_array_interface__ (CuPy's, Numba's, a torch.Tensor), got"
            f" {type(leaf).__name__}. For arrays on the host use arrays='numpy'"
        )
    shape = tuple(interface["shape"])
    dtype = np.dtype(interface["typestr"])
    wanted = np.dtype(buffer.dtype)
    # The interface has no code for dtypes like bfloat16: they are bytes of some size.
    is_bytes = dtype.kind == "V" and dtype.itemsize == wanted.itemsize
    fits = dtype == wanted or is_bytes
    if shape != buffer.shape or not fits:
        raise errors.ResultError(
            f"hostcall: {path} should be {wanted}{list(buffer.shape)}, got"
            f" {dtype}{list(shape)}"
        )
    strides = interface.get("strides")
    if strides is not None and tuple(strides) != _row_major(shape, dtype.itemsize):
        raise errors.ResultError(
            f"hostcall: {path} should be row-major, got strides {tuple(strides)} for"
            f" {dtype}{list(shape)}: make it contiguous"
        )
    nbytes = math.prod(shape) * dtype.itemsize
    address = interface["data"][0]  # with whether it is read-only
    _native.copy_into(buffer, address, nbytes, interface.get("stream"))


def _row_major(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """The strides of a row-major array."""
    return tuple(itemsize * math.prod(shape[i:]) for i in range(1, len(shape) + 1))
