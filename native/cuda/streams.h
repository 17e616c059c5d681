// The process's CUDA driver, its two pools of pinned memory, and work on a stream
// that needs no values on the host.
//
// Knows no Python and no XLA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "cuda/cuda_driver.h"
#include "cuda/pinned_pool.h"

namespace hostcall {

/// The driver. Throws std::runtime_error if there is none.
const CudaDriver& Driver();
/// Why there is no driver; empty if there is one.
std::string CudaMissing();

/// The pinned memory of calls and of taps, made at first use. There are two because
/// a tap holds its block until its device comes to it, and no call may wait for
/// that. Throws if there is no driver.
PinnedPool& PoolForCalls();
PinnedPool& PoolForTaps();
/// The same, or null if it was never used.
PinnedPool* PinnedForCalls();
PinnedPool* PinnedForTaps();
/// Bounds of both, also for a pool that is made later.
void LimitPinned(size_t for_calls, size_t for_taps);

/// Copies inside a GPU's memory, on `stream`. If the source was made on another
/// stream, waits for that stream and for the copy. If the stream is unknown (none,
/// or 0, which names none), waits for all that the device has to do. Throws
/// CudaError.
void CopyOnStream(void* stream, void* to, const void* from, size_t bytes,
                  std::optional<uintptr_t> made_on);

/// Waits until the work on `stream` is done. Throws CudaError.
void WaitForStream(void* stream);

}  // namespace hostcall
