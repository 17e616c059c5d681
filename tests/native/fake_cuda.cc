// A CUDA driver without a GPU: a shared library that HOSTCALL_CUDA_DRIVER names.
//
// Host memory stands for a device's memory. A stream is a queue with its own
// thread, so copies, events and host functions really happen later. The fake is
// stricter than the real driver, so that misuse is always an error here, not a rare
// fault there:
//   * copies to and from the host need memory of cuMemHostAlloc for the whole
//     range;
//   * freeing memory that a queued copy still uses aborts;
//   * a host function that calls CUDA gets CUDA_ERROR_NOT_PERMITTED;
//   * a function that needs a current context fails without one, and an event
//     belongs to the streams of its context;
//   * a capturing stream runs nothing, and waiting for it fails.
//
// It also exports functions for tests (fake*): streams, delays, failures, counters.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fake_cuda_codes.h"

#define FAKE_EXPORT extern "C" __attribute__((visibility("default")))

struct CUctx_st {
  int device;
};
struct CUevent_st {
  CUctx_st* context;
  // Whether its stream has reached the last recording. Each recording has a flag of
  // its own: another stream may wait for an earlier one.
  std::shared_ptr<bool> reached = std::make_shared<bool>(true);
};
struct CUstream_st {
  CUctx_st* context;
  std::deque<std::function<void()>> queue;
  long enqueued = 0, done = 0;
  bool capturing = false;
  bool closed = false;
  std::thread thread;
};

namespace {

using Event = std::shared_ptr<CUevent_st>;

struct Pinned {
  size_t size;
  int queued = 0;  // queued copies that use it
};

/// All state, guarded by one lock; streams copy memory without it. Never destroyed,
/// since threads of streams outlive the test.
struct World {
  std::mutex mutex;
  std::condition_variable changed;
  bool ready = false;
  CUctx_st contexts[2] = {{0}, {1}};
  CUstream_st* null_stream = nullptr;
  std::set<CUstream_st*> streams;
  std::map<CUevent_st*, Event> events;
  std::map<char*, Pinned> pinned;
  std::map<std::string, int> failures;
  std::map<std::string, long> counts;
  std::chrono::microseconds delay{0};
};

World& W() {
  static World* world = new World;
  return *world;
}
using Lock = std::unique_lock<std::mutex>;

thread_local std::vector<CUctx_st*> t_current;
thread_local bool t_in_host_function = false;

/// Begins each function of the driver: counts the call, and returns 0 or the code
/// that the function shall fail with.
int Enter(Lock&, const char* function) {
  ++W().counts[function];
  const auto failure = W().failures.extract(function);
  if (!failure.empty()) return failure.mapped();
  if (t_in_host_function) return kNotPermitted;
  return W().ready || std::strcmp(function, "cuInit") == 0 ? kSuccess
                                                           : kNotInitialized;
}
#define FAKE_ENTER()    \
  Lock lock(W().mutex); \
  if (const int code = Enter(lock, __func__); code != kSuccess) return code
#define FAKE_ENTER_STREAM(handle)           \
  FAKE_ENTER();                             \
  CUstream_st* stream = Find(lock, handle); \
  if (stream == nullptr) return kInvalidHandle
#define FAKE_ENTER_EVENT(handle)                            \
  FAKE_ENTER();                                             \
  if (W().events.count(handle) == 0) return kInvalidHandle; \
  const Event event = W().events[handle]

void Work(CUstream_st* stream) {
  Lock lock(W().mutex);
  for (;;) {
    W().changed.wait(lock,
                     [&] { return stream->closed || !stream->queue.empty(); });
    if (stream->queue.empty()) return;
    std::function<void()> operation = std::move(stream->queue.front());
    stream->queue.pop_front();
    const auto delay = W().delay;
    lock.unlock();
    if (delay.count() != 0) std::this_thread::sleep_for(delay);
    operation();
    operation = nullptr;
    lock.lock();
    ++stream->done;
    W().changed.notify_all();
  }
}

CUstream_st* NewStream(Lock&, int device) {
  auto* stream = new CUstream_st{};
  stream->context = &W().contexts[device];
  stream->thread = std::thread(Work, stream);
  W().streams.insert(stream);
  return stream;
}

/// The stream of a handle; null if there is none.
CUstream_st* Find(Lock& lock, CUstream_st* stream) {
  if (reinterpret_cast<uintptr_t>(stream) <= 2) {  // the default streams' names
    if (W().null_stream == nullptr) W().null_stream = NewStream(lock, 0);
    return W().null_stream;
  }
  return W().streams.count(stream) != 0 ? stream : nullptr;
}

void Enqueue(Lock&, CUstream_st* stream, std::function<void()> operation) {
  if (stream->capturing) return;
  stream->queue.push_back(std::move(operation));
  ++stream->enqueued;
  W().changed.notify_all();
}

void Wait(Lock& lock, CUstream_st* stream) {
  const long number = stream->enqueued;
  W().changed.wait(lock, [&] { return stream->done >= number; });
}

Pinned* FindPinned(Lock&, const void* data, size_t bytes) {
  auto* at = static_cast<char*>(const_cast<void*>(data));
  auto found = W().pinned.upper_bound(at);
  if (found == W().pinned.begin()) return nullptr;
  --found;
  const auto offset = static_cast<size_t>(at - found->first);
  const size_t size = found->second.size;
  return offset <= size && bytes <= size - offset ? &found->second : nullptr;
}

/// `host` is the side that has to be pinned; null for copies on the device.
int Copy(Lock& lock, void* to, const void* from, size_t bytes, const void* host,
         CUstream_st* handle) {
  CUstream_st* stream = Find(lock, handle);
  if (stream == nullptr) return kInvalidHandle;
  if (to == nullptr || from == nullptr) return kInvalidValue;
  if (t_current.empty() || t_current.back() != stream->context)
    return kInvalidContext;
  Pinned* pinned = host != nullptr ? FindPinned(lock, host, bytes) : nullptr;
  if (host != nullptr && pinned == nullptr) return kInvalidValue;
  if (stream->capturing) return kSuccess;
  if (pinned != nullptr) ++pinned->queued;
  Enqueue(lock, stream, [to, from, bytes, pinned] {
    std::memcpy(to, from, bytes);
    Lock done(W().mutex);
    if (pinned != nullptr) --pinned->queued;
  });
  return kSuccess;
}

void* Pointer(unsigned long long address) {
  return reinterpret_cast<void*>(address);
}

}  // namespace

// --- The driver -----------------------------------------------------------------

FAKE_EXPORT int cuInit(unsigned) {
  FAKE_ENTER();
  W().ready = true;
  return kSuccess;
}
FAKE_EXPORT int cuMemHostAlloc(void** data, size_t bytes, unsigned flags) {
  FAKE_ENTER();
  if (t_current.empty()) return kInvalidContext;
  if (bytes == 0 || (flags & 1) == 0) return kInvalidValue;  // has to be portable
  *data = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  if (*data == nullptr) return kOutOfMemory;
  std::memset(*data, 0xa5, bytes);
  W().pinned[static_cast<char*>(*data)] = Pinned{bytes};
  return kSuccess;
}
FAKE_EXPORT int cuMemFreeHost(void* data) {
  FAKE_ENTER();
  if (t_current.empty()) return kInvalidContext;
  const auto found = W().pinned.find(static_cast<char*>(data));
  if (found == W().pinned.end()) return kInvalidValue;
  if (found->second.queued != 0) {
    std::fputs("fake_cuda: memory is freed that a queued copy uses\n", stderr);
    std::abort();
  }
  W().pinned.erase(found);
  std::free(data);
  return kSuccess;
}
FAKE_EXPORT int cuMemcpyDtoHAsync_v2(void* to, unsigned long long from,
                                     size_t bytes, CUstream_st* stream) {
  FAKE_ENTER();
  return Copy(lock, to, Pointer(from), bytes, to, stream);
}
FAKE_EXPORT int cuMemcpyHtoDAsync_v2(unsigned long long to, const void* from,
                                     size_t bytes, CUstream_st* stream) {
  FAKE_ENTER();
  return Copy(lock, Pointer(to), from, bytes, from, stream);
}
FAKE_EXPORT int cuMemcpyDtoDAsync_v2(unsigned long long to, unsigned long long from,
                                     size_t bytes, CUstream_st* stream) {
  FAKE_ENTER();
  return Copy(lock, Pointer(to), Pointer(from), bytes, nullptr, stream);
}
FAKE_EXPORT int cuMemsetD8Async(unsigned long long to, unsigned char value,
                                size_t bytes, CUstream_st* handle) {
  FAKE_ENTER_STREAM(handle);
  Enqueue(lock, stream, [=] { std::memset(Pointer(to), value, bytes); });
  return kSuccess;
}
FAKE_EXPORT int cuStreamCreate(CUstream_st** stream, unsigned) {
  FAKE_ENTER();
  if (t_current.empty()) return kInvalidContext;
  *stream = NewStream(lock, t_current.back()->device);
  return kSuccess;
}
FAKE_EXPORT int cuStreamQuery(CUstream_st* handle) {
  FAKE_ENTER_STREAM(handle);
  return stream->done == stream->enqueued ? kSuccess : kNotReady;
}
FAKE_EXPORT int cuStreamSynchronize(CUstream_st* handle) {
  FAKE_ENTER_STREAM(handle);
  if (stream->capturing) return kCaptureUnsupported;
  Wait(lock, stream);
  return kSuccess;
}
FAKE_EXPORT int cuStreamGetCtx(CUstream_st* handle, CUctx_st** context) {
  FAKE_ENTER_STREAM(handle);
  *context = stream->context;
  return kSuccess;
}
FAKE_EXPORT int cuStreamIsCapturing(CUstream_st* handle, int* status) {
  FAKE_ENTER_STREAM(handle);
  *status = stream->capturing ? 1 : 0;
  return kSuccess;
}
FAKE_EXPORT int cuCtxGetCurrent(CUctx_st** context) {
  FAKE_ENTER();
  *context = t_current.empty() ? nullptr : t_current.back();
  return kSuccess;
}
FAKE_EXPORT int cuCtxPushCurrent_v2(CUctx_st* context) {
  FAKE_ENTER();
  if (context == nullptr) return kInvalidContext;
  t_current.push_back(context);
  return kSuccess;
}
FAKE_EXPORT int cuCtxPopCurrent_v2(CUctx_st** context) {
  FAKE_ENTER();
  if (t_current.empty()) return kInvalidContext;
  *context = t_current.back();
  t_current.pop_back();
  return kSuccess;
}
FAKE_EXPORT int cuCtxSynchronize() {
  FAKE_ENTER();
  if (t_current.empty()) return kInvalidContext;
  const std::set<CUstream_st*> streams = W().streams;
  for (CUstream_st* stream : streams) {
    if (stream->context != t_current.back()) continue;
    if (stream->capturing) return kCaptureUnsupported;
    Wait(lock, stream);
  }
  return kSuccess;
}
FAKE_EXPORT int cuEventCreate(CUevent_st** event, unsigned) {
  FAKE_ENTER();
  if (t_current.empty()) return kInvalidContext;
  const Event made = std::make_shared<CUevent_st>();
  made->context = t_current.back();
  W().events[made.get()] = made;
  *event = made.get();
  return kSuccess;
}
FAKE_EXPORT int cuEventRecord(CUevent_st* handle, CUstream_st* stream_handle) {
  FAKE_ENTER_EVENT(handle);
  CUstream_st* stream = Find(lock, stream_handle);
  if (stream == nullptr || event->context != stream->context) return kInvalidHandle;
  event->reached = std::make_shared<bool>(false);
  Enqueue(lock, stream, [reached = event->reached] {
    Lock done(W().mutex);
    *reached = true;
    W().changed.notify_all();
  });
  return kSuccess;
}
FAKE_EXPORT int cuStreamWaitEvent(CUstream_st* stream_handle, CUevent_st* handle,
                                  unsigned) {
  FAKE_ENTER_EVENT(handle);
  CUstream_st* stream = Find(lock, stream_handle);
  if (stream == nullptr) return kInvalidHandle;
  Enqueue(lock, stream, [reached = event->reached] {
    Lock waits(W().mutex);
    W().changed.wait(waits, [&] { return *reached; });
  });
  return kSuccess;
}
FAKE_EXPORT int cuEventQuery(CUevent_st* handle) {
  FAKE_ENTER_EVENT(handle);
  return *event->reached ? kSuccess : kNotReady;
}
FAKE_EXPORT int cuEventSynchronize(CUevent_st* handle) {
  FAKE_ENTER_EVENT(handle);
  W().changed.wait(lock, [reached = event->reached] { return *reached; });
  return kSuccess;
}
FAKE_EXPORT int cuEventDestroy_v2(CUevent_st* handle) {
  FAKE_ENTER();
  return W().events.erase(handle) != 0 ? kSuccess : kInvalidHandle;
}
FAKE_EXPORT int cuLaunchHostFunc(CUstream_st* handle, void (*function)(void*),
                                 void* data) {
  FAKE_ENTER_STREAM(handle);
  Enqueue(lock, stream, [function, data] {
    t_in_host_function = true;
    function(data);
    t_in_host_function = false;
  });
  return kSuccess;
}
FAKE_EXPORT int cuGetErrorName(int code, const char** name) {
#define FAKE_NAME(c, number, exported, text) \
  if (code == c) return *name = "CUDA_" exported, kSuccess;
  FAKE_CODES(FAKE_NAME)
  return *name = nullptr, kInvalidValue;
}
FAKE_EXPORT int cuGetErrorString(int code, const char** string) {
#define FAKE_TEXT(c, number, exported, text) \
  if (code == c) return *string = text, kSuccess;
  FAKE_CODES(FAKE_TEXT)
  return *string = nullptr, kInvalidValue;
}

// --- The test's side ------------------------------------------------------------

FAKE_EXPORT void* fakeStreamCreateOn(int device) {
  Lock lock(W().mutex);
  return NewStream(lock, device);
}
FAKE_EXPORT void* fakeStreamCreate() { return fakeStreamCreateOn(0); }

/// Returns when all streams are empty.
FAKE_EXPORT void fakeFinishAll() {
  Lock lock(W().mutex);
  W().changed.wait(lock, [] {
    for (const CUstream_st* stream : W().streams) {
      if (stream->done != stream->enqueued) return false;
    }
    return true;
  });
}

FAKE_EXPORT void fakeStreamDestroy(void* handle) {
  auto* stream = static_cast<CUstream_st*>(handle);
  {
    Lock lock(W().mutex);
    stream->closed = true;
    W().streams.erase(stream);
    W().changed.notify_all();
  }
  stream->thread.join();  // ends when the queue is empty
  delete stream;
}
FAKE_EXPORT void fakeSetDelayMicroseconds(long microseconds) {
  Lock lock(W().mutex);
  W().delay = std::chrono::microseconds(microseconds);
}
FAKE_EXPORT void fakeSetCapturing(void* handle, int capturing) {
  Lock lock(W().mutex);
  Find(lock, static_cast<CUstream_st*>(handle))->capturing = capturing != 0;
}
FAKE_EXPORT void fakeFailNext(const char* function, int code) {
  Lock lock(W().mutex);
  W().failures[function] = code;
}
FAKE_EXPORT long fakeCount(const char* function) {
  Lock lock(W().mutex);
  return W().counts[function];
}
FAKE_EXPORT size_t fakePinnedBytes() {
  Lock lock(W().mutex);
  size_t bytes = 0;
  for (const auto& pinned : W().pinned) bytes += pinned.second.size;
  return bytes;
}
/// Waits for what is queued, and clears delays, failures and counts. Streams,
/// events and memory stay.
FAKE_EXPORT void fakeReset() {
  Lock lock(W().mutex);
  W().delay = std::chrono::microseconds(0);
  for (CUstream_st* stream : std::set<CUstream_st*>(W().streams)) {
    Wait(lock, stream);
    stream->capturing = false;
  }
  W().failures.clear();
  W().counts.clear();
}
