// What XLA's CUDA runtime calls.
//
// The same plans, slots and states as on the CPU (cpu_handlers.h); instantiation is
// the same function. What differs is where operands and results are: in a GPU's
// memory, which work on XLA's stream fills and reads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cuda/pinned_pool.h"
#include "xla/ffi/api/c_api.h"

namespace hostcall {

/// A call of a function on the host: values through pinned memory, one wait.
XLA_FFI_Error* ExecuteCallOnCuda(XLA_FFI_CallFrame* frame);
/// A tap: neither the device nor the thread that dispatches waits for it.
XLA_FFI_Error* ExecuteTapOnCuda(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* ExecuteLinkOnCuda(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* ExecuteVerdictOnCuda(XLA_FFI_CallFrame* frame);
/// A call on the GPU's memory itself. Nothing is copied, nobody waits.
XLA_FFI_Error* ExecuteBuffersOnCuda(XLA_FFI_CallFrame* frame);
/// The same, and XLA may record it: then it runs once, and what it put on the
/// stream runs again and again.
XLA_FFI_Error* ExecuteBuffersInGraph(XLA_FFI_CallFrame* frame);

/// The pinned memory of calls, and of taps; null before the first. Two, since a
/// tap's block is held until its device comes to it, for which a call must not
/// wait.
PinnedPool* PinnedForCalls();
PinnedPool* PinnedForTaps();
/// Bounds of both, for those that are made later too.
void LimitPinned(size_t for_calls, size_t for_taps);

/// Copies inside the GPU's memory, on `stream`. What was made on another stream is
/// waited for, and so is the copy; where no stream is told (none, or 0, which names
/// none), all that the device has to do is waited for. Throws CudaError.
void CopyOnStream(void* stream, void* to, const void* from, size_t bytes,
                  std::optional<uintptr_t> made_on);

/// Why there is no driver; empty where there is one.
std::string CudaMissing();

/// For tests on machines without a GPU: handlers of these names for XLA's CPU
/// runtime, on streams of a driver that takes the host's memory for a device's.
/// They return when the stream is empty, since that runtime knows no streams.
XLA_FFI_Error* ExecuteCallStaged(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* ExecuteTapStaged(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* ExecuteLinkStaged(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* ExecuteVerdictStaged(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* ExecuteBuffersStaged(XLA_FFI_CallFrame* frame);
/// One for each device.
void SetStreamsForTests(std::vector<void*> streams);

}  // namespace hostcall
