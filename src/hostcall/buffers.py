"""`hostcall.buffers`: what `hostcall.buffer_callback` hands to a callback.

Buffer            an array in the device's memory, which the callback works on
ExecutionContext  the stage and, on a GPU, the stream of this execution
ExecutionStage    the stages, as JAX names them
native            makes machine code a callback: no Python and no GIL
"""

from hostcall._engine.params.buffer import (
    Buffer,
    ExecutionContext,
    ExecutionStage,
    native,
)

__all__ = ["Buffer", "ExecutionContext", "ExecutionStage", "native"]
