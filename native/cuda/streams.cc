#include "cuda/streams.h"

#include <atomic>
#include <mutex>
#include <stdexcept>

namespace hostcall {
namespace {

std::atomic<Gpus*> g_gpus{nullptr};  ///< null until first used; never freed
// Guards the limits, and the making of the pools. Without it, a thread could make
// the pools with old limits while another thread sets new ones and sees no pools to
// apply them to. Finding pools that exist takes no lock.
std::mutex g_mutex;
size_t g_for_calls = 1'000'000'000, g_for_taps = 256'000'000;  ///< limits in bytes

}  // namespace

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

Gpus& Gpus::Get() {
  static Gpus* const gpus = [] {
    const CudaDriver& driver = Driver();
    std::lock_guard<std::mutex> lock(g_mutex);
    g_gpus.store(
        new Gpus{{driver, g_for_calls}, {driver, g_for_taps}, TapStreams(driver)});
    return g_gpus.load();
  }();
  return *gpus;
}

Gpus* Gpus::IfUsed() { return g_gpus.load(); }

void LimitPinned(size_t for_calls, size_t for_taps) {
  std::lock_guard<std::mutex> lock(g_mutex);
  g_for_calls = for_calls;
  g_for_taps = for_taps;
  if (Gpus* gpus = Gpus::IfUsed()) {
    gpus->for_calls.set_limit(for_calls);
    gpus->for_taps.set_limit(for_taps);
  }
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
