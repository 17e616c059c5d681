// The process's two pools of pinned memory, its streams for taps, and the
// operations on a stream that need no staging through pinned memory.
//
// Does not depend on Python or XLA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "cuda/cuda_driver.h"
#include "cuda/pinned_pool.h"
#include "cuda/staging.h"

namespace hostcall {

/// What the process has for its GPUs.
struct Gpus {
  static Gpus& Get() { return Immortal<Gpus>(); }

  /// The pinned memory of calls and of taps, which use it once Driver() has
  /// returned. There are two pools because a tap holds its block until its device
  /// has reached it, and a call must not wait for that.
  PinnedPool for_calls{1'000'000'000};
  PinnedPool for_taps{256'000'000};
  TapStreams streams;  ///< of taps
};

/// Copies inside a GPU's memory, on the stream `on`. `made_on` is the stream on
/// which the source was made. If it is another one, this waits for that stream
/// before the copy, and for the copy. If it is unknown (null, or 0, which is
/// ambiguous), this waits for all work of the current context instead, and for the
/// copy. Throws CudaError.
void CopyOnStream(CudaStream on, void* to, const void* from, size_t bytes,
                  std::optional<uintptr_t> made_on);

}  // namespace hostcall
