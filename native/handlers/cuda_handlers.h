// The handlers for XLA's CUDA runtime.
//
// Plans, slots and states are the same as on the CPU (plan_state.h). But operands
// and results lie in a GPU's memory, which only work on XLA's stream may read and
// write.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace hostcall {

/// A call of a function on the host. Its values go through pinned memory, with one
/// wait for the device (cuda/staging.h).
XLA_FFI_Error* ExecuteCallOnCuda(XLA_FFI_CallFrame* frame);
/// A tap: neither the device nor the thread that dispatches waits for it.
XLA_FFI_Error* ExecuteTapOnCuda(XLA_FFI_CallFrame* frame);
/// As ExecuteLink and ExecuteVerdict on the CPU.
XLA_FFI_Error* ExecuteLinkOnCuda(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* ExecuteVerdictOnCuda(XLA_FFI_CallFrame* frame);
/// A call of a function that works on the GPU's memory itself: nothing is copied,
/// and nobody waits for the device.
XLA_FFI_Error* ExecuteBuffersOnCuda(XLA_FFI_CallFrame* frame);
/// The same, but XLA may record it into a command buffer. The function then runs
/// once, and the work that it has put on the stream is repeated with each run.
XLA_FFI_Error* ExecuteBuffersInGraph(XLA_FFI_CallFrame* frame);

}  // namespace hostcall
