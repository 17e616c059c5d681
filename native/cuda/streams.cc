#include "cuda/streams.h"

namespace hostcall {

void CopyOnStream(CudaStream on, void* to, const void* from, size_t bytes,
                  std::optional<uintptr_t> made_on) {
  const bool same = made_on && *made_on == reinterpret_cast<uintptr_t>(on);
  ScopedContext current(on);
  if (!made_on || *made_on == 0) {  // any stream may still be writing the source
    Driver().Check(Driver().cuCtxSynchronize(), "cuCtxSynchronize");
  } else if (!same) {
    // 1 and 2 stand for the default streams, and are valid handles for the driver:
    // CU_STREAM_LEGACY and CU_STREAM_PER_THREAD.
    const auto theirs = reinterpret_cast<CudaStream>(*made_on);
    Driver().Synchronize(theirs);
  }
  Driver().CopyOnDevice(on, to, from, bytes);
  // The source's owner orders its reuse on its own stream, not on this one, and may
  // free it as soon as this returns. On the same stream the reuse comes after the
  // copy anyway.
  if (!same) Driver().Synchronize(on);
}

}  // namespace hostcall
