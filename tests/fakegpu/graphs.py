"""How tests have XLA record a program into a CUDA graph, and what can be recorded."""

from __future__ import annotations

import ctypes
from typing import Any

# Options of jax.jit: kernels and calls are recorded, however few there are.
RECORDED = {
    "xla_gpu_graph_min_graph_size": 1,
    "xla_gpu_enable_command_buffer": "FUSION,CUSTOM_CALL",
}


def copied(ctx: Any, out: Any, x: Any) -> None:
    """Copies on XLA's stream, as a kernel of the user's would work on it."""
    code = ctypes.CDLL("libcuda.so.1").cuMemcpyDtoDAsync_v2(
        ctypes.c_uint64(out.ptr),
        ctypes.c_uint64(x.ptr),
        ctypes.c_size_t(x.nbytes),
        ctypes.c_void_p(ctx.stream),
    )
    assert code == 0
