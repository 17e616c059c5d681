// The driver of tests/fakegpu itself: each broken rule is a fault that names it,
// and each hostile mode does what its name says. Without this, a test that passes
// on the driver could mean that the driver looks at nothing.
#include <atomic>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "../fakegpu/codes.h"
#include "fake_cuda.h"

namespace hostcall {
namespace {

#define MORE_FUNCTIONS(X)                                                         \
  X(cuMemAlloc_v2, (CudaDevicePtr*, size_t))                                      \
  X(cuMemFree_v2, (CudaDevicePtr))                                                \
  X(cuStreamDestroy_v2, (CudaStream))                                             \
  X(cuMemcpyPeerAsync,                                                            \
    (CudaDevicePtr, CudaContext, CudaDevicePtr, CudaContext, size_t, CudaStream)) \
  X(cuStreamBeginCapture_v2, (CudaStream, int mode))                              \
  X(cuStreamEndCapture, (CudaStream, void** graph))                               \
  X(cuGraphInstantiateWithFlags, (void**, void*, CudaDevicePtr))                  \
  X(cuGraphExecDestroy, (void*))                                                  \
  X(cuGraphLaunch, (void*, CudaStream))                                           \
  X(cuLaunchKernel, (void*, unsigned, unsigned, unsigned, unsigned, unsigned,     \
                     unsigned, unsigned, CudaStream, void**, void**))
#define MORE_DECLARE(name, parameters) int(*name) parameters;
MORE_FUNCTIONS(MORE_DECLARE)

void LoadMore() {
  void* library = dlopen(FAKE_CUDA, RTLD_NOW);
#define MORE_FIND(name, parameters) \
  name = reinterpret_cast<int(*) parameters>(dlsym(library, #name));
  MORE_FUNCTIONS(MORE_FIND)
}

/// Asserts that exactly one rule was broken, with this text.
void AssertFault(const std::string& text) {
  const std::string faults = fakeTakeFaults();
  if (faults != text + "\n") std::fprintf(stderr, "not \"%s\"\n", text.c_str());
  assert(faults == text + "\n");
}
void AssertNoFault() { assert(std::string(fakeTakeFaults()).empty()); }

/// Pinned memory, while its stream's context is current.
struct Pinned {
  explicit Pinned(size_t bytes) {
    assert(Driver().cuMemHostAlloc(&data, bytes, kCudaHostAllocPortable) == 0);
  }
  ~Pinned() { assert(Driver().cuMemFreeHost(data) == 0); }
  void* data = nullptr;
};

CudaDevicePtr OnDevice(size_t bytes) {
  CudaDevicePtr address = 0;
  assert(cuMemAlloc_v2(&address, bytes) == 0);
  return address;
}

// --- Rules ----------------------------------------------------------------------

void NothingOfCudaInAHostFunction() {
  Stream stream;
  struct Asks {
    CudaStream stream;
    int code = 0;
  } asks{stream};
  const auto ask = [](void* data) {
    auto* const one = static_cast<Asks*>(data);
    one->code = Driver().cuStreamQuery(one->stream);
  };
  assert(Driver().cuLaunchHostFunc(stream, ask, &asks) == 0);
  stream.Wait();
  assert(asks.code == kNotPermitted);
  AssertFault("cuStreamQuery in a host function");
}

void CopiesNeedContextDeviceAndPinnedMemory() {
  Stream stream, other(1);
  ScopedContext current(stream);
  const Pinned pinned(64);
  char pageable[64] = {};
  const CudaDevicePtr device = OnDevice(64);
  const auto fetch = [&](void* to, CudaDevicePtr from, size_t bytes,
                         CudaStream on) {
    return Driver().cuMemcpyDtoHAsync_v2(to, from, bytes, on);
  };
  const std::string name = "cuMemcpyDtoHAsync_v2: ";
  assert(fetch(pinned.data, device, 64, stream) == 0);
  AssertNoFault();
  assert(fetch(pinned.data, device, 64, other) != 0);
  AssertFault(name + "another context is current");
  assert(fetch(pinned.data, device + 1, 64, stream) != 0);
  AssertFault(name + "this is no memory of a device");
  assert(fetch(static_cast<char*>(pinned.data) + 1, device, 64, stream) != 0);
  AssertFault(name + "this is no pinned memory");
  assert(fetch(pageable, device, 64, stream) != 0);
  AssertFault(name + "this is no pinned memory");
  assert(cuMemFree_v2(device) == 0);
  assert(fetch(pinned.data, device, 64, stream) != 0);
  AssertFault(name + "this is no memory of a device");
  assert(cuMemFree_v2(device) != 0);
  AssertFault("memory is freed that is not there");
}

void CopiesBetweenDevicesNameTheirContexts() {
  Stream first(0), second(1);
  CudaDevicePtr from, to;
  {
    ScopedContext current(first);
    from = OnDevice(64);
  }
  {
    ScopedContext current(second);
    to = OnDevice(64);
  }
  ScopedContext current(first);
  CudaContext of_first, of_second;
  assert(Driver().cuStreamGetCtx(first, &of_first) == 0);
  assert(Driver().cuStreamGetCtx(second, &of_second) == 0);
  const auto copy = [&](CudaContext to_context, CudaContext from_context) {
    return cuMemcpyPeerAsync(to, to_context, from, from_context, 64, first);
  };
  assert(copy(of_second, of_first) == 0);
  AssertNoFault();
  assert(copy(of_first, of_second) != 0);
  AssertFault("cuMemcpyPeerAsync: this is another device's memory");
  first.Wait();
  assert(cuMemFree_v2(from) == 0);
  assert(cuMemFree_v2(to) == 0);
}

void PinnedMemoryIsKeptWhileACopyIsQueued() {
  Stream stream;
  ScopedContext current(stream);
  const Pinned pinned(64);
  const CudaDevicePtr device = OnDevice(64);
  Gate gate;
  stream.Block(gate);
  assert(Driver().cuMemcpyHtoDAsync_v2(device, pinned.data, 64, stream) == 0);
  assert(Driver().cuMemFreeHost(pinned.data) != 0);
  AssertFault("memory is freed that a queued copy uses");
  gate.Open();
  stream.Wait();
  assert(cuMemFree_v2(device) == 0);
}

void EventsAndStreamsBelongAndAreThere() {
  Stream stream, other(1);
  ScopedContext current(stream);
  CudaEvent event;
  assert(Driver().cuEventCreate(&event, kCudaEventDisableTiming) == 0);
  assert(Driver().cuEventRecord(event, other) != 0);
  AssertFault("cuEventRecord: a stream of another context");
  assert(Driver().cuEventDestroy_v2(event) == 0);
  assert(Driver().cuEventQuery(event) != 0);
  AssertFault("no such event");
  CudaStream made;
  assert(Driver().cuStreamCreate(&made, kCudaStreamNonBlocking) == 0);
  assert(cuStreamDestroy_v2(made) == 0);
  assert(Driver().cuStreamQuery(made) != 0);
  AssertFault("no such stream");
}

void WaitingSpoilsACapture() {
  Stream stream;
  void* graph = nullptr;
  assert(cuStreamBeginCapture_v2(stream, 0) == 0);
  assert(Driver().cuStreamSynchronize(stream) == kCaptureUnsupported);
  assert(cuStreamEndCapture(stream, &graph) == kCaptureInvalidated &&
         graph == nullptr);
  AssertNoFault();
}

void AGraphFindsItsMemoryGone() {
  Stream stream;
  ScopedContext current(stream);
  const Pinned pinned(64);
  std::memset(pinned.data, 1, 64);
  const CudaDevicePtr device = OnDevice(64);
  void *graph = nullptr, *instance = nullptr;
  assert(cuStreamBeginCapture_v2(stream, 0) == 0);
  assert(Driver().cuMemcpyDtoHAsync_v2(pinned.data, device, 64, stream) == 0);
  assert(cuStreamEndCapture(stream, &graph) == 0);
  stream.Wait();
  assert(static_cast<char*>(pinned.data)[63] == 1);  // recorded, and not done
  assert(cuGraphInstantiateWithFlags(&instance, graph, 0) == 0);
  assert(cuGraphLaunch(instance, stream) == 0);
  stream.Wait();
  assert(static_cast<char*>(pinned.data)[63] != 1);
  AssertNoFault();
  assert(cuMemFree_v2(device) == 0);
  assert(cuGraphLaunch(instance, stream) == 0);
  stream.Wait();
  AssertFault("cuMemcpyDtoHAsync_v2: a graph has a copy of memory that is gone");
  assert(cuGraphExecDestroy(instance) == 0);
}

void KernelsAreCountedAndRefused() {
  Stream stream;
  const long before = fakeKernels();
  assert(cuLaunchKernel(nullptr, 1, 1, 1, 1, 1, 1, 0, stream, nullptr, nullptr) !=
         0);
  assert(fakeKernels() == before + 1);
  AssertNoFault();
}

// --- Modes ----------------------------------------------------------------------

/// Work on a stream that notes when it is done.
struct Noted {
  void On(CudaStream stream) {
    const auto note = [](void* data) {
      auto* const one = static_cast<Noted*>(data);
      one->at = one->next->fetch_add(1);
    };
    assert(Driver().cuLaunchHostFunc(stream, note, this) == 0);
  }
  std::atomic<int>* next;
  int at = -1;
};

void SlowWorkIsSlow() {
  Stream stream;
  std::atomic<int> next{0};
  Noted work{&next};
  fakeSetDelayMicroseconds(20'000);
  const auto begin = std::chrono::steady_clock::now();
  work.On(stream);
  stream.Wait();
  assert(std::chrono::steady_clock::now() - begin >= milliseconds(20));
  fakeReset();
}

/// Later work of another stream comes first at times, unless an event forbids it.
void StreamsOvertakeEachOther() {
  Stream early, late;
  ScopedContext current(early);
  CudaEvent event;
  assert(Driver().cuEventCreate(&event, kCudaEventDisableTiming) == 0);
  fakeSetReordered(1);
  for (bool ordered : {true, false}) {
    int overtaken = 0;
    for (int i = 0; ordered ? i < 100 : overtaken == 0; ++i) {
      std::atomic<int> next{0};
      Noted first{&next}, second{&next}, third{&next};
      first.On(early);
      second.On(early);
      if (ordered) {
        assert(Driver().cuEventRecord(event, early) == 0);
        assert(Driver().cuStreamWaitEvent(late, event, 0) == 0);
      }
      third.On(late);
      early.Wait();
      late.Wait();
      assert(first.at < second.at);  // one stream keeps its order
      overtaken += third.at == 0;
      assert(!ordered || third.at == 2);
    }
  }
  assert(Driver().cuEventDestroy_v2(event) == 0);
  fakeReset();
}

/// The calls that are made under `waits`, while a stream is stopped.
void PinnedMemoryWaitsForAllStreams(bool waits) {
  Stream stream, other(1);
  ScopedContext current(stream);
  Gate gate;
  std::atomic<int> next{0};
  Noted work{&next};
  other.Block(gate);
  work.On(other);
  fakeSetPinnedWaits(waits);
  if (!waits) {
    const Pinned pinned(64);  // else this would hang
    gate.Open();
  } else {
    std::thread opens([&gate] {
      WaitUntil([] { return fakeCount("cuMemHostAlloc") > 0; });
      gate.Open();
    });
    const Pinned pinned(64);
    assert(next == 1);  // the stream's work is done
    opens.join();
  }
  fakeReset();
}

/// Waits end, work that is queued is dropped, all later calls fail: in one process
/// nothing comes after it.
void ALostContextStaysLost() {
  Stream stream;
  ScopedContext current(stream);
  Gate gate;
  std::atomic<int> next{0};
  Noted dropped{&next};
  stream.Block(gate);
  dropped.On(stream);
  std::atomic<int> waited{-1};
  std::thread waits([&] { waited = Driver().cuStreamSynchronize(stream); });
  WaitUntil([] { return fakeCount("cuStreamSynchronize") > 0; });
  fakeLoseAfter(2);
  assert(Driver().cuStreamQuery(stream) == kCudaNotReady);
  assert(Driver().cuStreamQuery(stream) == kIllegalAddress);
  gate.Open();
  waits.join();
  assert(waited == kIllegalAddress && next == 0);
  void* data = nullptr;
  for (int i = 0; i < 3; ++i) {
    assert(Driver().cuMemHostAlloc(&data, 64, kCudaHostAllocPortable) ==
           kIllegalAddress);
  }
  CudaContext context;
  assert(Driver().cuCtxGetCurrent(&context) == 0);  // asks no device
}

}  // namespace
}  // namespace hostcall

int main() {
  using namespace hostcall;  // NOLINT
  LoadFake();
  LoadMore();
  NothingOfCudaInAHostFunction();
  CopiesNeedContextDeviceAndPinnedMemory();
  CopiesBetweenDevicesNameTheirContexts();
  PinnedMemoryIsKeptWhileACopyIsQueued();
  EventsAndStreamsBelongAndAreThere();
  WaitingSpoilsACapture();
  AGraphFindsItsMemoryGone();
  KernelsAreCountedAndRefused();
  SlowWorkIsSlow();
  StreamsOvertakeEachOther();
  PinnedMemoryWaitsForAllStreams(false);
  PinnedMemoryWaitsForAllStreams(true);
  ALostContextStaysLost();
  std::puts("driver: ok");
}
