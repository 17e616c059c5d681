"""`hostcall.buffers`: types that `hostcall.buffer_callback` passes to a callback.

Buffer            an array in the device's memory, which the callback reads or writes
ExecutionContext  the stage and, on a GPU, the stream of this execution
ExecutionStage    the stages of an execution, from JAX
native            wraps machine code as a callback, which runs without the GIL
"""

from hostcall._engine.params.buffer import (
    Buffer,
    ExecutionContext,
    ExecutionStage,
    native,
)

__all__ = ["Buffer", "ExecutionContext", "ExecutionStage", "native"]
