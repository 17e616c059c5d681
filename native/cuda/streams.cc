#include "cuda/streams.h"

#include <atomic>
#include <mutex>
#include <stdexcept>

namespace hostcall {
namespace {

/// One of the two pools.
struct Place {
  explicit Place(size_t bytes) : limit(bytes) {}
  std::atomic<PinnedPool*> pool{nullptr};
  size_t limit;  ///< guarded by g_mutex
};

Place g_for_calls{1'000'000'000}, g_for_taps{256'000'000};
// Between a thread that makes a pool with the limit of that moment and one that
// changes the limit: neither may miss the other. Finding a pool takes no lock.
std::mutex g_mutex;

/// Never destroyed: the driver's threads give blocks back until the process ends.
PinnedPool& PoolAt(Place& place) {
  if (PinnedPool* pool = place.pool.load()) return *pool;
  const CudaDriver& driver = Driver();
  std::lock_guard<std::mutex> lock(g_mutex);
  PinnedPool* pool = place.pool.load();
  if (pool == nullptr) {
    pool = new PinnedPool(driver, place.limit);
    place.pool.store(pool);
  }
  return *pool;
}

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

PinnedPool& PoolForCalls() { return PoolAt(g_for_calls); }
PinnedPool& PoolForTaps() { return PoolAt(g_for_taps); }
PinnedPool* PinnedForCalls() { return g_for_calls.pool.load(); }
PinnedPool* PinnedForTaps() { return g_for_taps.pool.load(); }

void LimitPinned(size_t for_calls, size_t for_taps) {
  std::lock_guard<std::mutex> lock(g_mutex);
  g_for_calls.limit = for_calls;
  g_for_taps.limit = for_taps;
  if (PinnedPool* pool = PinnedForCalls()) pool->set_limit(for_calls);
  if (PinnedPool* pool = PinnedForTaps()) pool->set_limit(for_taps);
}

void CopyOnStream(void* stream, void* to, const void* from, size_t bytes,
                  std::optional<uintptr_t> made_on) {
  const CudaDriver& driver = Driver();
  const auto on = static_cast<CudaStream>(stream);
  const bool same = made_on && *made_on == reinterpret_cast<uintptr_t>(stream);
  ScopedContext current(driver, on);
  if (!made_on || *made_on == 0) {  // it may have been made on any stream
    driver.Check(driver.cuCtxSynchronize(), "cuCtxSynchronize");
  } else if (!same) {  // 1 and 2 name the default streams, to the driver too
    const auto theirs = reinterpret_cast<CudaStream>(*made_on);
    driver.Check(driver.cuStreamSynchronize(theirs), "cuStreamSynchronize");
  }
  driver.Check(
      driver.cuMemcpyDtoDAsync_v2(reinterpret_cast<CudaDevicePtr>(to),
                                  reinterpret_cast<CudaDevicePtr>(from), bytes, on),
      "cuMemcpyDtoDAsync");
  // Whoever made the source on another stream may reuse its memory at once.
  if (!same) driver.Check(driver.cuStreamSynchronize(on), "cuStreamSynchronize");
}

void WaitForStream(void* stream) {
  const CudaDriver& driver = Driver();
  const auto on = static_cast<CudaStream>(stream);
  ScopedContext current(driver, on);
  driver.Check(driver.cuStreamSynchronize(on), "cuStreamSynchronize");
}

}  // namespace hostcall
