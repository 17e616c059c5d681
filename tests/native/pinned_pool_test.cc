// The driver that is opened at run time, and the pool of pinned memory, with the
// driver of tests/fakegpu.
#include "cuda/pinned_pool.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "fake_cuda.h"

namespace hostcall {
namespace {

// --- The driver -----------------------------------------------------------------

/// Forks, since a process looks for the driver only once. Called before there are
/// threads.
void WithoutADriverThereIsAReason(const char* path, const char* expected) {
  const pid_t child = fork();
  if (child == 0) {
    setenv("HOSTCALL_CUDA_DRIVER", path, 1);
    if (*path == '\0' && CudaMissing().empty()) _exit(0);  // there is a GPU
    if (std::strcmp(path, FAKE_CUDA) == 0) {
      LoadFake();
      fakeFailNext("cuInit", 100);
    }
    const std::string why = CudaMissing();
    std::string thrown, again;
    for (std::string* text : {&thrown, &again}) {
      try {
        Driver();
      } catch (const std::runtime_error& error) {
        *text = error.what();
      }
    }
    const bool right = why.find(expected) != std::string::npos && why == thrown;
    if (!right) std::fprintf(stderr, "%s\n", why.c_str());
    _exit(right && thrown == again ? 0 : 1);
  }
  int status = -1;
  assert(waitpid(child, &status, 0) == child && status == 0);
}

void AnErrorNamesTheFunction() {
  try {
    Driver().Check(2, "cuMemHostAlloc");
    assert(false);
  } catch (const CudaError& error) {
    assert(std::string(error.what()) ==
           "hostcall: cuMemHostAlloc failed: CUDA_ERROR_OUT_OF_MEMORY "
           "(out of memory)");
  }
}

// --- The pool -------------------------------------------------------------------

constexpr size_t kBlock = PinnedPool::kLeast;

/// Acquires a block on a thread of its own, and holds it until Finish.
struct Taker {
  Taker(PinnedPool& pool, CudaStream stream, size_t bytes)
      : thread([this, &pool, stream, bytes] {
          ScopedContext current(stream);
          PinnedBlock block = pool.Acquire(bytes);
          got = true;
          gate.Wait();
        }) {}
  void Finish() {
    gate.Open();
    thread.join();
  }
  Gate gate;
  std::atomic<bool> got{false};
  std::thread thread;
};

void Capacities() {
  for (const auto& [bytes, capacity] :
       std::vector<std::pair<size_t, size_t>>{{0, 4096},
                                              {1, 4096},
                                              {4096, 4096},
                                              {4097, 8192},
                                              {600'000, 1 << 20},
                                              {(1 << 20) + 1, 2 << 20},
                                              {5 << 20, 5 << 20}}) {
    assert(PinnedPool::CapacityFor(bytes) == capacity);
  }
}

void BlocksAreUsedAgain() {
  PinnedPool pool(4 * kBlock, kForEver);
  Stream stream, other(1);
  {
    ScopedContext current(stream);
    PinnedBlock block = pool.Acquire(100);
    char* const data = block.data();
    assert(pool.stats().in_use_bytes == kBlock);
    PinnedBlock moved = std::move(block);
    assert(!block && block.data() == nullptr && moved.data() == data);
    block = std::move(moved);
    block.Release();
    block.Release();
    assert(!block && pool.stats().in_use_bytes == 0);
    // With an event, and in another context, which needs another event.
    for (const Stream* on : {&stream, &stream, &other, &stream}) {
      block = pool.Acquire(3000);
      assert(block.data() == data);
      block.ReleaseAfter(*on);
      on->Wait();
    }
    assert(pool.stats().allocations == 1 && pool.stats().reuses == 4);
    assert(fakeCount("cuEventCreate") == 3 && fakeCount("cuEventDestroy_v2") == 2);
  }
  AssertClean(pool);
}

void AFullPoolWaitsInTheOrderOfArrival() {
  PinnedPool pool(2 * kBlock, kForEver);
  Stream stream;
  {
    ScopedContext current(stream);
    PinnedBlock first = pool.Acquire(kBlock);
    pool.Acquire(kBlock).Release();         // idle: any request could take it
    Taker large(pool, stream, 3 * kBlock);  // too large: waits for an empty pool
    WaitUntil([&] { return pool.stats().waits == 1; });
    Taker small(pool, stream, kBlock);  // would fit, but comes later
    assert(!pool.Acquire(kBlock, false));
    std::this_thread::sleep_for(milliseconds(20));
    assert(!large.got && !small.got);
    first.Release();
    WaitUntil([&] { return large.got.load(); });
    assert(pool.stats().allocated_bytes == 4 * kBlock);  // the first was freed
    WaitUntil([&] { return pool.stats().waits == 2; });
    assert(!small.got && !pool.Acquire(1, false));
    large.Finish();
    WaitUntil([&] { return small.got.load(); });
    assert(pool.stats().allocated_bytes == kBlock && pool.stats().overruns == 0);
    small.Finish();
    assert(fakePinnedBytes() == kBlock);
  }
  AssertClean(pool);
}

void AFullPoolWaitsForTheDevice() {
  PinnedPool pool(kBlock, kForEver);
  Stream stream;
  Gate gate;
  stream.Block(gate);
  {
    ScopedContext current(stream);
    pool.Acquire(kBlock).ReleaseAfter(stream);
    assert(!pool.Acquire(1, false) && pool.stats().waits == 0);
    Taker taker(pool, stream, kBlock);
    WaitUntil([&] { return pool.stats().waits == 1; });
    assert(!taker.got && !pool.Acquire(1, false));
    gate.Open();
    taker.Finish();
    assert(taker.got && pool.stats().allocations == 1);
    assert(pool.Acquire(1, false));
  }
  AssertClean(pool);
}

/// A thread that waits for a block held by itself, which stands for a ring of
/// threads: it goes over the limit.
void NobodyWaitsForEver() {
  PinnedPool pool(kBlock, milliseconds(20));
  Stream stream;
  {
    ScopedContext current(stream);
    PinnedBlock held = pool.Acquire(kBlock), over = pool.Acquire(kBlock);
    assert(held && over && held.data() != over.data());
    assert(pool.stats().overruns == 1 && pool.stats().waits == 1);
    assert(!pool.Acquire(kBlock, false));
  }
  {
    ScopedContext current(stream);
    PinnedBlock block = pool.Acquire(kBlock);
    assert(fakePinnedBytes() == kBlock);  // the limit holds again
  }
  AssertClean(pool);
}

void TheLimitMayChange() {
  PinnedPool pool(8 * kBlock, kForEver);
  Stream stream;
  {
    ScopedContext current(stream);
    PinnedBlock held = pool.Acquire(kBlock);
    {
      PinnedBlock a = pool.Acquire(kBlock), b = pool.Acquire(2 * kBlock);
    }
    assert(fakePinnedBytes() == 4 * kBlock);
    pool.set_limit(kBlock);
    assert(fakePinnedBytes() == kBlock && pool.stats().limit == kBlock);
    Taker taker(pool, stream, kBlock);
    WaitUntil([&] { return pool.stats().waits == 1; });
    pool.set_limit(2 * kBlock);
    WaitUntil([&] { return taker.got.load(); });
    taker.Finish();
  }
  AssertClean(pool);
}

void WithoutMemoryIdleBlocksAreFreed() {
  PinnedPool pool(8 * kBlock, kForEver);
  Stream stream;
  {
    ScopedContext current(stream);
    pool.Acquire(kBlock).Release();
    fakeFailNext("cuMemHostAlloc", 2);
    PinnedBlock block = pool.Acquire(2 * kBlock);
    assert(block && fakePinnedBytes() == 2 * kBlock);
  }
  AssertClean(pool);
}

/// Blocks of all capacities, some above the limit; no two owners share a block.
void Stress() {
  constexpr size_t kLimit = 40 * kBlock, kLargest = 60 * kBlock;
  PinnedPool pool(kLimit, kForEver);
  std::atomic<int> refused{0};
  std::vector<std::thread> threads;
  for (uint32_t number = 0; number < 6; ++number) {
    threads.emplace_back([&pool, &refused, number] {
      std::mt19937 random(number);
      Stream stream(static_cast<int>(number % 2));
      ScopedContext current(stream);
      for (int i = 0; i < 300; ++i) {
        const size_t most = random() % 20 == 0 ? kLargest : kLimit / 4;
        const size_t bytes = 1 + random() % most;
        const bool may_wait = random() % 4 != 0;
        PinnedBlock block = pool.Acquire(bytes, may_wait);
        refused += block ? 0 : 1;
        if (!block) continue;
        std::vector<char> to(std::min<size_t>(bytes, 500));
        const char value = static_cast<char>(number * 16 + random() % 16);
        std::memset(block.data(), value, to.size());
        if (random() % 2 == 0) std::this_thread::yield();
        const auto device = reinterpret_cast<CudaDevicePtr>(to.data());
        assert(Driver().cuMemcpyHtoDAsync_v2(device, block.data(), to.size(),
                                             stream) == 0);
        block.ReleaseAfter(stream);
        stream.Wait();
        assert(to == std::vector<char>(to.size(), value));
        if (random() % 50 == 0) {  // frees what is idle
          pool.set_limit(0);
          pool.set_limit(kLimit);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const PinnedPool::Stats stats = pool.stats();
  assert(stats.peak_bytes <= PinnedPool::CapacityFor(kLargest));
  assert(stats.overruns == 0 && stats.waits > 0);
  assert(stats.allocations + stats.reuses == 6 * 300 - refused);
  AssertClean(pool);
}

/// Runs last, since the memory is never freed: the device may still write to it.
void ABlockIsLostIfNothingTellsWhenItsWorkEnds() {
  static PinnedPool pool(2 * kBlock, kForEver);  // lives on, as all do
  Stream stream;
  ScopedContext current(stream);
  PinnedBlock block = pool.Acquire(1);
  char* const data = block.data();
  fakeFailNext("cuEventRecord", 999);
  fakeFailNext("cuStreamSynchronize", 999);
  try {
    block.ReleaseAfter(stream);
    assert(false);
  } catch (const CudaError& error) {
    assert(std::string(error.what()) ==
           "hostcall: cuStreamSynchronize failed: error 999");
  }
  assert(!block && pool.stats().in_use_bytes == kBlock);
  assert(pool.Acquire(1).data() != data);
  pool.set_limit(0);
  assert(pool.stats().allocated_bytes == kBlock && fakePinnedBytes() == kBlock);
}

}  // namespace
}  // namespace hostcall

int main() {
  using namespace hostcall;  // NOLINT
  WithoutADriverThereIsAReason("/nonexistent/libcuda.so",
                               "/nonexistent/libcuda.so");
  WithoutADriverThereIsAReason("libm.so.6", "lacks cuInit, cuMemHostAlloc, ");
  WithoutADriverThereIsAReason("", "libcuda.so.1");
  WithoutADriverThereIsAReason(FAKE_CUDA, "CUDA_ERROR_NO_DEVICE (no CUDA-capable");
  LoadFake();
  AnErrorNamesTheFunction();
  Capacities();
  BlocksAreUsedAgain();
  AFullPoolWaitsInTheOrderOfArrival();
  AFullPoolWaitsForTheDevice();
  NobodyWaitsForEver();
  TheLimitMayChange();
  WithoutMemoryIdleBlocksAreFreed();
  for (int i = 0; i < 3; ++i) Stress();
  ABlockIsLostIfNothingTellsWhenItsWorkEnds();
  std::puts("pinned_pool: ok");
}
