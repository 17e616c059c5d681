// What tests ask of the driver, and tell it.
#include <utility>

#include "world.h"

using namespace fakegpu;

/// Calls of a function of the driver that were not XLA's.
EXPORT long fakeCount(const char* function) {
  Lock lock(W().mutex);
  return W().counts[function];
}
/// Kernels that could not be run.
EXPORT long fakeKernels() {
  Lock lock(W().mutex);
  return W().kernels;
}
/// Kernels that were.
EXPORT long fakeLaunches() {
  Lock lock(W().mutex);
  return W().launches;
}
EXPORT void fakeCountKernel(const char* what) {
  Lock lock(W().mutex);
  Missing(lock, what);
}
/// What could not be run so far, one a line, with how often. The text is the
/// calling thread's until its next call.
EXPORT const char* fakeMissing() {
  thread_local std::string text;
  Lock lock(W().mutex);
  text.clear();
  for (const auto& [what, count] : W().missing)
    text += std::to_string(count) + " " + what + "\n";
  return text.c_str();
}
/// For tests of that count.
EXPORT void fakeForgetMissing() {
  Lock lock(W().mutex);
  W().kernels = 0;
  W().missing.clear();
}
EXPORT long fakeGraphLaunches() {
  Lock lock(W().mutex);
  return W().graph_launches;
}
/// The rules that were broken since the last call, one a line. The text is the
/// calling thread's until its next call.
EXPORT const char* fakeTakeFaults() {
  thread_local std::string taken;
  Lock lock(W().mutex);
  taken = std::exchange(W().faults, "");
  return taken.c_str();
}
/// Pinned memory that is not XLA's.
EXPORT size_t fakePinnedBytes() {
  Lock lock(W().mutex);
  size_t bytes = 0;
  for (const auto& [at, block] : W().pinned) bytes += block.ours ? block.size : 0;
  return bytes;
}

/// The next call of the function that is not XLA's fails.
EXPORT void fakeFailNext(const char* function, int code) {
  Lock lock(W().mutex);
  W().failures[function] = code;
}
/// Calls of the function that are not XLA's do nothing, and succeed: as if hostcall
/// had forgotten a wait.
EXPORT void fakeIgnore(const char* function) {
  Lock lock(W().mutex);
  W().ignored.insert(function);
}
EXPORT void fakeSetDelayMicroseconds(long microseconds) {
  Lock lock(W().mutex);
  W().delay = std::chrono::microseconds(microseconds);
}
/// Streams overtake each other wherever events allow.
EXPORT void fakeSetReordered(int reordered) {
  Lock lock(W().mutex);
  W().reordered = reordered != 0;
}
/// Allocating and freeing pinned memory waits for all streams.
EXPORT void fakeSetPinnedWaits(int waits) {
  Lock lock(W().mutex);
  W().pinned_waits = waits != 0;
}
/// Each device's memory is of so many bytes; 0: as much as the host has.
EXPORT void fakeSetMemoryLimit(size_t bytes) {
  Lock lock(W().mutex);
  W().limit = bytes;
}
/// What a device's memory holds.
EXPORT size_t fakeDeviceBytes(int device) {
  Lock lock(W().mutex);
  return DeviceBytes(lock, device);
}
/// After so many further calls that are not XLA's, the context is lost: work that
/// is queued is dropped, and all calls fail. That can't be undone.
EXPORT void fakeLoseAfter(long calls) {
  Lock lock(W().mutex);
  W().left = calls;
}
EXPORT void fakeSetCapturing(void* handle, int capturing) {
  Lock lock(W().mutex);
  CUstream_st* const stream = Find(lock, static_cast<CUstream_st*>(handle));
  stream->capture = capturing != 0 ? NewGraph(lock) : nullptr;
}

EXPORT void* fakeStreamCreateOn(int device) {
  Lock lock(W().mutex);
  return NewStream(lock, &W().contexts[device]);
}
EXPORT void* fakeStreamCreate() { return fakeStreamCreateOn(0); }
EXPORT void fakeFinishAll() {
  Lock lock(W().mutex);
  WaitForAll(lock);
}
/// Returns when the stream has done what is queued.
EXPORT void fakeStreamDestroy(void* handle) {
  Lock lock(W().mutex);
  auto* const stream = static_cast<CUstream_st*>(handle);
  stream->capture = nullptr;
  std::thread thread = Close(lock, stream);
  lock.unlock();
  thread.join();
}
/// Waits for what is queued, and clears delays, failures and counts. Streams,
/// events and memory stay.
EXPORT void fakeReset() {
  Lock lock(W().mutex);
  W().delay = std::chrono::microseconds(0);
  W().limit = 0;
  W().ignored.clear();
  W().reordered = W().pinned_waits = false;
  WaitForAll(lock);
  for (CUstream_st* stream : W().streams) stream->capture = nullptr;
  W().failures.clear();
  W().counts.clear();
}
