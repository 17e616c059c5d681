// What XLA's CUDA runtime calls.
//
// Plans, slots and states are the same as on the CPU (plan_state.h). The difference
// is that operands and results lie in a GPU's memory, which work on XLA's stream
// fills and reads.
#pragma once

#include <vector>

#include "xla/ffi/api/c_api.h"

namespace hostcall {

/// A call of a function on the host: values go through pinned memory, with one wait
/// for the device.
XLA_FFI_Error* ExecuteCallOnCuda(XLA_FFI_CallFrame* frame);
/// A tap: neither the device nor the thread that dispatches waits for it.
XLA_FFI_Error* ExecuteTapOnCuda(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* ExecuteLinkOnCuda(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* ExecuteVerdictOnCuda(XLA_FFI_CallFrame* frame);
/// A call on the GPU's memory itself: no copies and no waiting.
XLA_FFI_Error* ExecuteBuffersOnCuda(XLA_FFI_CallFrame* frame);
/// The same, and XLA may record it into a command buffer: then the function runs
/// once, and the work that it put on the stream runs again and again.
XLA_FFI_Error* ExecuteBuffersInGraph(XLA_FFI_CallFrame* frame);

/// For tests on machines without a GPU: the same handlers for XLA's CPU runtime,
/// with a driver that takes the host's memory for a device's. They return when
/// their stream is empty, since that runtime knows no streams.
XLA_FFI_Error* ExecuteCallStaged(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* ExecuteTapStaged(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* ExecuteLinkStaged(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* ExecuteVerdictStaged(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* ExecuteBuffersStaged(XLA_FFI_CallFrame* frame);
/// The streams that these use, one for each device.
void SetStreamsForTests(std::vector<void*> streams);

}  // namespace hostcall
