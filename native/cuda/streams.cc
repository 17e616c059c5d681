#include "cuda/streams.h"

#include <stdexcept>

namespace hostcall {

const CudaDriver& Driver() {
  std::string why;
  const CudaDriver* driver = CudaDriver::Get(&why);
  if (driver == nullptr) throw std::runtime_error(why);
  return *driver;
}

std::string CudaMissing() {
  std::string why;
  return CudaDriver::Get(&why) != nullptr ? "" : why;
}

void CopyOnStream(void* stream, void* to, const void* from, size_t bytes,
                  std::optional<uintptr_t> made_on) {
  const CudaDriver& driver = Driver();
  const auto on = static_cast<CudaStream>(stream);
  const bool same = made_on && *made_on == reinterpret_cast<uintptr_t>(stream);
  ScopedContext current(driver, on);
  if (!made_on || *made_on == 0) {  // any stream may still be writing the source
    driver.Check(driver.cuCtxSynchronize(), "cuCtxSynchronize");
  } else if (!same) {
    // 1 and 2 stand for the default streams, and are valid handles for the driver:
    // CU_STREAM_LEGACY and CU_STREAM_PER_THREAD.
    const auto theirs = reinterpret_cast<CudaStream>(*made_on);
    driver.Synchronize(theirs);
  }
  driver.CopyOnDevice(on, to, from, bytes);
  // The source's owner orders its reuse on its own stream, not on this one, and may
  // free it as soon as this returns. On the same stream the reuse comes after the
  // copy anyway.
  if (!same) driver.Synchronize(on);
}

bool IsCaptured(void* stream) {
  const auto on = static_cast<CudaStream>(stream);
  ScopedContext current(Driver(), on);
  return Driver().IsCaptured(on);
}

void WaitForStream(void* stream) {
  const auto on = static_cast<CudaStream>(stream);
  ScopedContext current(Driver(), on);
  Driver().Synchronize(on);
}

}  // namespace hostcall
