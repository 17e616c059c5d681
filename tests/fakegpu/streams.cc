// Streams, events and host functions.
#include <cstdint>

#include "world.h"

EXPORT int cuStreamCreate(CUstream_st** stream, unsigned) {
  ENTER();
  if (t_current.empty()) return kInvalidContext;
  return *stream = NewStream(lock, t_current.back()), kSuccess;
}
EXPORT int cuStreamCreateWithPriority(CUstream_st** stream, unsigned, int) {
  ENTER();
  if (t_current.empty()) return kInvalidContext;
  return *stream = NewStream(lock, t_current.back()), kSuccess;
}
EXPORT int cuStreamDestroy_v2(CUstream_st* handle) {
  ENTER();
  if (W().streams.count(handle) == 0)
    return Fault(lock, "no such stream", kInvalidHandle);
  return Close(lock, handle).detach(), kSuccess;
}
EXPORT int cuStreamSynchronize(CUstream_st* handle) {
  ENTER_STREAM(handle);
  return Wait(lock, stream);
}
EXPORT int cuStreamQuery(CUstream_st* handle) {
  ENTER_STREAM(handle);
  if (stream->capture != nullptr) return kCaptureUnsupported;
  if (stream->done != stream->enqueued) return kNotReady;
  return Join(W().host, stream->clock), kSuccess;
}
EXPORT int cuStreamGetCtx(CUstream_st* handle, CUctx_st** context) {
  ENTER_STREAM(handle);
  return *context = stream->context, kSuccess;
}
EXPORT int cuStreamIsCapturing(CUstream_st* handle, int* status) {
  ENTER_STREAM(handle);
  return *status = stream->capture != nullptr ? 1 : 0, kSuccess;
}
EXPORT int cuStreamGetPriority(CUstream_st*, int* priority) {
  return *priority = 0, kSuccess;
}
EXPORT int cuStreamGetId(CUstream_st* handle, unsigned long long* id) {
  return *id = reinterpret_cast<uintptr_t>(handle), kSuccess;
}
EXPORT int cuStreamWaitEvent(CUstream_st* stream_handle, CUevent_st* handle,
                             unsigned) {
  ENTER_EVENT(handle);
  CUstream_st* const stream = Find(lock, stream_handle);
  if (stream == nullptr) return Fault(lock, "no such stream", kInvalidHandle);
  if (stream->capture == nullptr) Join(stream->clock, event->clock);
  Enqueue(lock, stream, [reached = event->reached] {
    Lock waits(W().mutex);
    W().changed.wait(waits, [&] { return *reached || W().lost; });
  });
  return kSuccess;
}
EXPORT int cuLaunchHostFunc(CUstream_st* handle, void (*function)(void*),
                            void* data) {
  ENTER_STREAM(handle);
  return Enqueue(lock, stream, HostOp(function, data)), kSuccess;
}

EXPORT int cuEventCreate(CUevent_st** event, unsigned) {
  ENTER();
  if (t_current.empty()) return kInvalidContext;
  const auto made = std::make_shared<CUevent_st>();
  made->context = t_current.back();
  W().events[made.get()] = made;
  return *event = made.get(), kSuccess;
}
EXPORT int cuEventRecord(CUevent_st* handle, CUstream_st* stream_handle) {
  ENTER_EVENT(handle);
  CUstream_st* const stream = Find(lock, stream_handle);
  if (stream == nullptr) return Fault(lock, "no such stream", kInvalidHandle);
  if (event->context != stream->context)
    return Fault(lock, "cuEventRecord: a stream of another context",
                 kInvalidHandle);
  event->reached = std::make_shared<bool>(false);
  Enqueue(lock, stream, [reached = event->reached] {
    Lock done(W().mutex);
    *reached = true;
    W().changed.notify_all();
  });
  event->clock = stream->clock;
  return kSuccess;
}
EXPORT int cuEventQuery(CUevent_st* handle) {
  ENTER_EVENT(handle);
  if (!*event->reached) return kNotReady;
  return Join(W().host, event->clock), kSuccess;
}
EXPORT int cuEventSynchronize(CUevent_st* handle) {
  ENTER_EVENT(handle);
  const Clock clock = event->clock;
  W().changed.wait(lock,
                   [reached = event->reached] { return *reached || W().lost; });
  Join(W().host, clock);
  return W().lost ? kIllegalAddress : kSuccess;
}
EXPORT int cuEventElapsedTime(float* milliseconds, CUevent_st*, CUevent_st*) {
  return *milliseconds = 0.01f, kSuccess;
}
EXPORT int cuEventElapsedTime_v2(float* milliseconds, CUevent_st*, CUevent_st*) {
  return *milliseconds = 0.01f, kSuccess;
}
EXPORT int cuEventDestroy_v2(CUevent_st* handle) {
  ENTER();
  if (W().events.erase(handle) == 0)
    return Fault(lock, "no such event", kInvalidHandle);
  return kSuccess;
}
