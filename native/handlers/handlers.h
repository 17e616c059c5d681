// The handlers that XLA runs at each execution of their place in a program. Those
// that it runs when it compiles or loads a program are in plan_state.h.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace hostcall {

// --- For XLA's CPU runtime

/// Makes a call of a function on the host.
XLA_FFI_Error* ExecuteCall(XLA_FFI_CallFrame* frame);
/// Fails the program if a call failed in any process (plan/outcome.h). It runs
/// behind the reduction that brings the call's results to all processes. Its
/// operands are the call's outcome and results, and its own results share the
/// memory of the call's.
XLA_FFI_Error* ExecuteVerdict(XLA_FFI_CallFrame* frame);
/// Queues a tap (plan/push_tap.h).
XLA_FFI_Error* ExecuteTap(XLA_FFI_CallFrame* frame);
/// Copies its operand, a number, to its result. It turns the order of effects into
/// a data dependency (_primitives/blocks.py).
XLA_FFI_Error* ExecuteLink(XLA_FFI_CallFrame* frame);

// --- For XLA's CUDA runtime
//
// Plans, slots and states are the same as on the CPU. But operands and results lie
// in a GPU's memory, which only work on XLA's stream may read and write.

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
