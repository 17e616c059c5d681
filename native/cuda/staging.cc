#include "cuda/staging.h"

#include <chrono>
#include <memory>
#include <thread>
#include <utility>

#include "base/code.h"

namespace hostcall {
namespace {

/// Time between two looks of Await: what a barrier may take longer than its taps.
constexpr std::chrono::microseconds kPoll{50};
/// Enough for cache lines and vector registers; NumPy and XLA require no more.
constexpr size_t kAlignment = 64;

size_t Padded(size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

size_t Total(const std::vector<Span>& spans) {
  size_t total = 0;
  for (const Span& span : spans) total += Padded(span.bytes);
  return total;
}

/// The address of values without bytes, if there is no block. It is not null, since
/// NumPy takes a null pointer as a request to allocate.
char* Nowhere() {
  alignas(kAlignment) static char nowhere[kAlignment];
  return nowhere;
}

/// Appends the host address of each span, laid out from `at` on; returns the end.
char* Place(const std::vector<Span>& spans, char* at, std::vector<void*>& places) {
  places.reserve(spans.size());
  for (const Span& span : spans) {
    places.push_back(at);
    at += Padded(span.bytes);
  }
  return at;
}

void RefuseCapture(const CudaDriver& driver, CudaStream stream) {
  if (!driver.IsCaptured(stream)) return;
  throw CudaError(
      "hostcall: the stream is being captured into a CUDA graph, in which the host "
      "can't be called. Keep XLA from capturing: set "
      "XLA_FLAGS=--xla_gpu_enable_command_buffer=" HOSTCALL_CODE("hc-device"));
}

/// Enqueues the copies to the host. Sets `*enqueued` before the first one, since
/// nothing tells how far a copy that failed has got.
void CopyToHost(const CudaDriver& driver, CudaStream stream,
                const std::vector<Span>& spans, const std::vector<void*>& places,
                bool* enqueued) {
  for (size_t i = 0; i < spans.size(); ++i) {
    *enqueued |= spans[i].bytes != 0;
    driver.CopyToHost(stream, places[i], spans[i].device, spans[i].bytes);
  }
}

/// Returns the block after a failure, which is reported by other means. If copies
/// were enqueued, the block goes back behind them.
void ReleaseQuietly(PinnedBlock& block, bool enqueued, CudaStream stream) noexcept {
  if (!block || !enqueued) return block.Release();
  try {
    block.ReleaseAfter(stream);
  } catch (const CudaError&) {  // the block is lost, and so never reused
  }
}

}  // namespace

// --- Calls ----------------------------------------------------------------------

StagedCall::StagedCall(const CudaDriver& driver, PinnedPool& pool,
                       CudaStream stream, std::vector<Span> operands,
                       std::vector<Span> results)
    : driver_(driver),
      stream_(stream),
      operands_(std::move(operands)),
      results_(std::move(results)) {
  const size_t bytes = Total(operands_) + Total(results_);
  {
    ScopedContext current(driver_, stream_);
    RefuseCapture(driver_, stream_);
    if (bytes != 0) block_ = pool.Acquire(bytes);
  }
  char* at = block_ ? block_.data() : Nowhere();
  at = Place(operands_, at, operand_data_);
  Place(results_, at, result_data_);
}

StagedCall::~StagedCall() { ReleaseQuietly(block_, in_flight_, stream_); }

void StagedCall::Fetch() {
  ScopedContext current(driver_, stream_);
  CopyToHost(driver_, stream_, operands_, operand_data_, &in_flight_);
  if (!in_flight_) return;
  driver_.Synchronize(stream_);
  in_flight_ = false;
}

void StagedCall::Store() {
  ScopedContext current(driver_, stream_);
  for (size_t i = 0; i < results_.size(); ++i) {
    in_flight_ |= results_[i].bytes != 0;
    driver_.CopyToDevice(stream_, results_[i].device, result_data_[i],
                         results_[i].bytes);
  }
  if (in_flight_) {
    block_.ReleaseAfter(stream_);
  } else {
    block_.Release();
  }
}

// --- Taps -----------------------------------------------------------------------

void TapStreams::RunBehind(CudaContext context, CudaStream stream,
                           CudaHostFn function, void* data) {
  std::lock_guard<std::mutex> lock(mutex_);
  Behind& behind = behind_[context];
  if (behind.event == nullptr) {
    driver_.Check(driver_.cuEventCreate(&behind.event, kCudaEventDisableTiming),
                  "cuEventCreate");
  }
  if (behind.stream == nullptr) {
    driver_.Check(driver_.cuStreamCreate(&behind.stream, kCudaStreamNonBlocking),
                  "cuStreamCreate");
  }
  driver_.Check(driver_.cuEventRecord(behind.event, stream), "cuEventRecord");
  // The wait is for this recording, also when the event is recorded again.
  driver_.Check(driver_.cuStreamWaitEvent(behind.stream, behind.event, 0),
                "cuStreamWaitEvent");
  driver_.Check(driver_.cuLaunchHostFunc(behind.stream, function, data),
                "cuLaunchHostFunc");
}

bool TapStreams::Await(double seconds) {
  const auto until =
      std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  std::map<CudaContext, Behind> behind;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    behind = behind_;
  }
  for (const auto& [context, one] : behind) {
    if (one.stream == nullptr) continue;
    try {
      ScopedContext current(driver_, context);
      while (driver_.cuStreamQuery(one.stream) == kCudaNotReady) {
        if (std::chrono::steady_clock::now() >= until) return false;
        std::this_thread::sleep_for(kPoll);
      }
    } catch (const CudaError&) {  // the context is gone, and its taps with it
    }
  }
  return true;
}

namespace {

/// What a tap needs on the driver's thread. Members are destroyed in reverse order,
/// so everything that the receiver holds is gone before the block goes back.
struct TapJob {
  PinnedBlock block;
  std::vector<void*> data;
  Receiver receiver;
};

/// Called by the driver when the copies have ended. Makes no CUDA call: destroying
/// the job releases the block without an event, which takes only the pool's lock.
void RunTap(void* adopted) {
  const std::unique_ptr<TapJob> job(static_cast<TapJob*>(adopted));
  try {
    job->receiver.deliver(job->data.data());
  } catch (...) {
    job->receiver.lose();
  }
}

}  // namespace

void StageTap(const CudaDriver& driver, PinnedPool& pool, TapStreams& streams,
              CudaStream stream, const std::vector<Span>& spans, bool may_wait,
              Receiver receiver) {
  ScopedContext current(driver, stream);
  RefuseCapture(driver, stream);
  auto job = std::make_unique<TapJob>();
  job->receiver = std::move(receiver);
  const size_t bytes = Total(spans);
  if (bytes != 0) {
    job->block = pool.Acquire(bytes, may_wait);
    if (!job->block) return job->receiver.lose();
  }
  Place(spans, job->block ? job->block.data() : Nowhere(), job->data);
  bool enqueued = false;
  try {
    CopyToHost(driver, stream, spans, job->data, &enqueued);
    streams.RunBehind(current.context(), stream, RunTap, job.get());
  } catch (...) {
    ReleaseQuietly(job->block, enqueued, stream);
    throw;
  }
  // RunTap owns the job now, and may already have freed it, so nothing may be read.
  (void)job.release();
}

}  // namespace hostcall
