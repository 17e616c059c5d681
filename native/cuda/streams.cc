#include "cuda/streams.h"

#include <atomic>
#include <mutex>
#include <stdexcept>

namespace hostcall {
namespace {

/// One of the two pools, and its limit before it is made.
struct Place {
  explicit Place(size_t bytes) : limit(bytes) {}
  std::atomic<PinnedPool*> pool{nullptr};  ///< null until first used; never freed
  size_t limit;                            ///< in bytes; guarded by g_mutex
};

Place g_for_calls{1'000'000'000}, g_for_taps{256'000'000};
std::atomic<TapStreams*> g_streams{
    nullptr};  ///< null until first used; never freed
// Guards the limits, and the making of the pools. Without it, a thread could make a
// pool with the old limit while another thread sets a new one and sees no pool to
// apply it to. Finding a pool that exists takes no lock.
std::mutex g_mutex;

/// Returns the pool, made at first use. It is never destroyed, since the driver's
/// threads return blocks until the process ends.
PinnedPool& PoolAt(Place& place) {
  if (PinnedPool* pool = place.pool.load()) return *pool;
  const CudaDriver& driver = Driver();  // may throw
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

TapStreams& StreamsForTaps() {
  static TapStreams* const streams = new TapStreams(Driver());
  g_streams.store(streams);
  return *streams;
}

bool AwaitTapsOfGpus(double seconds) {
  TapStreams* streams = g_streams.load();
  return streams == nullptr || streams->Await(seconds);
}

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
  if (!made_on || *made_on == 0) {  // any stream may still be writing the source
    driver.Check(driver.cuCtxSynchronize(), "cuCtxSynchronize");
  } else if (!same) {
    // 1 and 2 stand for the default streams, and are valid handles for the driver:
    // CU_STREAM_LEGACY and CU_STREAM_PER_THREAD.
    const auto theirs = reinterpret_cast<CudaStream>(*made_on);
    driver.Check(driver.cuStreamSynchronize(theirs), "cuStreamSynchronize");
  }
  driver.Check(
      driver.cuMemcpyDtoDAsync_v2(reinterpret_cast<CudaDevicePtr>(to),
                                  reinterpret_cast<CudaDevicePtr>(from), bytes, on),
      "cuMemcpyDtoDAsync");
  // The source's owner orders its reuse on its own stream, not on this one, and may
  // free it as soon as this returns. On the same stream the reuse comes after the
  // copy anyway.
  if (!same) driver.Check(driver.cuStreamSynchronize(on), "cuStreamSynchronize");
}

bool IsCaptured(void* stream) {
  const CudaDriver& driver = Driver();
  const auto on = static_cast<CudaStream>(stream);
  ScopedContext current(driver, on);
  int status = 0;
  driver.Check(driver.cuStreamIsCapturing(on, &status), "cuStreamIsCapturing");
  return status != 0;
}

void WaitForStream(void* stream) {
  const CudaDriver& driver = Driver();
  const auto on = static_cast<CudaStream>(stream);
  ScopedContext current(driver, on);
  driver.Check(driver.cuStreamSynchronize(on), "cuStreamSynchronize");
}

}  // namespace hostcall
