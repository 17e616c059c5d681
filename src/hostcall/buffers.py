"""`hostcall.buffers`: callbacks on the device's memory, and what they get.

buffer_callback   drop-in for `jax.experimental.buffer_callback`
Buffer            an array in the device's memory, which the callback reads or writes
ExecutionContext  the stage and, on a GPU, the stream of this execution
ExecutionStage    the stages of an execution, from JAX
native            wraps machine code as a callback, which runs without the GIL
"""

from hostcall._compat.buffer_callback import buffer_callback
from hostcall._engine.params.buffer import (
    Buffer,
    ExecutionContext,
    ExecutionStage,
    native,
)

__all__ = ["Buffer", "ExecutionContext", "ExecutionStage", "buffer_callback", "native"]
