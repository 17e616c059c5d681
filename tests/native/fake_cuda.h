// The driver of tests/fakegpu as tests use it. Its README says where it is stricter
// than the real one.
#pragma once

#undef NDEBUG
#include <dlfcn.h>

#include <cassert>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <thread>
#include <vector>

#include "cuda/cuda_driver.h"
#include "cuda/pinned_pool.h"
#include "visit.h"

namespace hostcall {

#define FAKE_FUNCTIONS(X)                                  \
  X(void*, fakeStreamCreateOn, (int device))               \
  X(void, fakeStreamDestroy, (void* stream))               \
  X(void, fakeSetDelayMicroseconds, (long microseconds))   \
  X(void, fakeSetCapturing, (void* stream, int capturing)) \
  X(void, fakeFailNext, (const char* function, int code))  \
  X(void, fakeSetReordered, (int reordered))               \
  X(void, fakeSetPinnedWaits, (int waits))                 \
  X(void, fakeLoseAfter, (long calls))                     \
  X(long, fakeCount, (const char* function))               \
  X(long, fakeKernels, ())                                 \
  X(const char*, fakeTakeFaults, ())                       \
  X(size_t, fakePinnedBytes, ())                           \
  X(void, fakeReset, ())
#define FAKE_DECLARE(type, name, parameters) inline type(*name) parameters;
FAKE_FUNCTIONS(FAKE_DECLARE)

/// Makes Driver() open the fake. Called before the first use of Driver().
inline void LoadFake() {
  setenv("HOSTCALL_CUDA_DRIVER", FAKE_CUDA, 1);
  void* library = dlopen(FAKE_CUDA, RTLD_NOW);
  assert(library != nullptr);
#define FAKE_FIND(type, name, parameters) \
  name = reinterpret_cast<type(*) parameters>(dlsym(library, #name));
  FAKE_FUNCTIONS(FAKE_FIND)
}

struct Stream {
  explicit Stream(int device = 0) : stream(fakeStreamCreateOn(device)) {}
  ~Stream() { fakeStreamDestroy(stream); }
  operator CudaStream() const { return static_cast<CudaStream>(stream); }
  void Wait() const { assert(Driver().cuStreamSynchronize(*this) == 0); }
  /// Stops the stream until the gate opens.
  void Block(Gate& gate) const {
    const auto wait = [](void* data) { static_cast<Gate*>(data)->Wait(); };
    assert(Driver().cuLaunchHostFunc(*this, wait, &gate) == 0);
  }
  void* stream;
};

using std::chrono::milliseconds;

using Array = std::vector<char>;
inline Array Numbers(size_t size, int seed) {
  Array array(size);
  for (size_t i = 0; i < size; ++i)
    array[i] = static_cast<char>(i * 7 + i / 251 + seed);
  return array;
}

/// The number of calls that waited for the device.
inline long Waits() {
  return fakeCount("cuStreamSynchronize") + fakeCount("cuEventSynchronize");
}

/// Frees the blocks that are neither in use nor pending.
inline void Trim(PinnedPool& pool) {
  const size_t limit = pool.stats().limit;
  pool.set_limit(0);
  pool.set_limit(limit);
}

/// Asserts that no rule of CUDA was broken, and that nothing is left behind: no
/// block, no pinned memory, no current context.
inline void AssertClean(PinnedPool& pool) {
  fakeReset();
  Trim(pool);
  const PinnedPool::Stats stats = pool.stats();
  assert(stats.in_use_bytes == 0 && stats.pending_bytes == 0);
  assert(stats.allocated_bytes == 0 && fakePinnedBytes() == 0);
  assert(*fakeTakeFaults() == '\0');
  CudaContext context;
  assert(Driver().cuCtxGetCurrent(&context) == 0 && context == nullptr);
}

inline void WaitUntil(const std::function<bool()>& condition) {
  while (!condition()) std::this_thread::sleep_for(milliseconds(1));
}

}  // namespace hostcall
