#include "cuda/staging.h"

#include <algorithm>
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

/// The address of values without bytes, if there is no block. It is not null, since
/// NumPy takes a null pointer as a request to allocate.
char* Nowhere() {
  alignas(kAlignment) static char nowhere[kAlignment];
  return nowhere;
}

/// Takes a block for all spans of a call or tap on the stream, whose context is
/// current, and gives the host address of each. `acquire(bytes)` returns the block;
/// false if it returns none.
template <typename Acquire>
bool Place(CudaStream stream, const std::vector<Span>& spans, Acquire acquire,
           PinnedBlock& block, std::vector<void*>& places) {
  if (Driver().IsCaptured(stream)) {
    throw CudaError(
        "hostcall: the stream is being captured into a CUDA graph, in which the "
        "host can't be called. Keep XLA from capturing: set "
        "XLA_FLAGS=--xla_gpu_enable_command_buffer=" HOSTCALL_CODE("hc-device"));
  }
  // Nothing may fail between the block and its first copy: copies of another tap
  // into a block that was taken from it are still enqueued.
  places.reserve(spans.size());
  size_t bytes = 0;
  for (const Span& span : spans) bytes += Padded(span.bytes);
  if (bytes != 0) block = acquire(bytes);
  if (bytes != 0 && !block) return false;
  char* at = block ? block.data() : Nowhere();
  for (const Span& span : spans) {
    places.push_back(at);
    at += Padded(span.bytes);
  }
  return true;
}

/// Enqueues the copies of the first `n` spans to the host. Sets `*enqueued` before
/// the first one, since nothing tells how far a copy that failed has got.
void CopyToHost(CudaStream stream, const std::vector<Span>& spans, size_t n,
                const std::vector<void*>& places, bool* enqueued) {
  for (size_t i = 0; i < n; ++i) {
    if (spans[i].bytes == 0) continue;
    *enqueued = true;
    Driver().CopyToHost(stream, places[i], spans[i].device, spans[i].bytes);
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

StagedCall::StagedCall(PinnedPool& pool, CudaStream stream,
                       std::vector<Span> operands, const std::vector<Span>& results)
    : stream_(stream), n_operands_(operands.size()), spans_(std::move(operands)) {
  spans_.insert(spans_.end(), results.begin(), results.end());
  ScopedContext current(stream_);
  Place(
      stream_, spans_, [&pool](size_t bytes) { return pool.Acquire(bytes); },
      block_, data_);
}

StagedCall::~StagedCall() { ReleaseQuietly(block_, in_flight_, stream_); }

void StagedCall::Fetch() {
  ScopedContext current(stream_);
  CopyToHost(stream_, spans_, n_operands_, data_, &in_flight_);
  if (!in_flight_) return;
  Driver().Synchronize(stream_);
  in_flight_ = false;
}

void StagedCall::Store() {
  ScopedContext current(stream_);
  for (size_t i = n_operands_; i < spans_.size(); ++i) {
    if (spans_[i].bytes == 0) continue;
    in_flight_ = true;
    Driver().CopyToDevice(stream_, spans_[i].device, data_[i], spans_[i].bytes);
  }
  if (in_flight_) {
    block_.ReleaseAfter(stream_);
  } else {
    block_.Release();
  }
}

// --- Taps -----------------------------------------------------------------------

void TapStreams::RunBehind(CudaContext context, CudaStream stream,
                           std::unique_ptr<Job>& job) {
  std::lock_guard<std::mutex> lock(mutex_);
  Behind& behind = behind_[context];
  if (behind.event == nullptr) {
    Driver().Check(Driver().cuEventCreate(&behind.event, kCudaEventDisableTiming),
                   "cuEventCreate");
  }
  if (behind.stream == nullptr) {
    Driver().Check(Driver().cuStreamCreate(&behind.stream, kCudaStreamNonBlocking),
                   "cuStreamCreate");
  }
  Driver().Check(Driver().cuEventRecord(behind.event, stream), "cuEventRecord");
  // The wait is for this recording, also when the event is recorded again.
  Driver().Check(Driver().cuStreamWaitEvent(behind.stream, behind.event, 0),
                 "cuStreamWaitEvent");
  job->ended_ = &behind.ended;
  Driver().Check(Driver().cuLaunchHostFunc(behind.stream, RunJob, job.get()),
                 "cuLaunchHostFunc");
  // RunJob owns the job now, and may already have destroyed it.
  (void)job.release();
  ++behind.given;
}

/// Called by the driver when the copies have ended.
void TapStreams::RunJob(void* adopted) {
  std::unique_ptr<Job> job(static_cast<Job*>(adopted));
  std::atomic<int64_t>& ended = *job->ended_;
  job->Run();
  job.reset();
  // Last: whoever waits for the job may then use what it has written and given
  // back.
  ended.fetch_add(1, std::memory_order_release);
}

bool TapStreams::Await(double seconds, WaitFor which) {
  const auto until =
      std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  struct Wanted {
    CudaContext context;
    CudaStream stream;
    int64_t jobs;
    const std::atomic<int64_t>* ended;
  };
  std::vector<Wanted> wanted;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [context, behind] : behind_) {
      if (behind.ended.load(std::memory_order_acquire) >= behind.given) continue;
      // The event tells of the last job, so of those before it. An error of the
      // context is for the loop below.
      if (which == WaitFor::kReachedTaps &&
          Driver().cuEventQuery(behind.event) == kCudaNotReady) {
        continue;
      }
      wanted.push_back({context, behind.stream, behind.given, &behind.ended});
    }
  }
  for (const Wanted& one : wanted) {
    try {
      ScopedContext current(one.context);
      // If the stream has no work left, or can't be asked, no job of it is to come.
      while (one.ended->load(std::memory_order_acquire) < one.jobs &&
             Driver().cuStreamQuery(one.stream) == kCudaNotReady) {
        if (std::chrono::steady_clock::now() >= until) return false;
        std::this_thread::sleep_for(kPoll);
      }
    } catch (const CudaError&) {  // the context is gone, and its taps with it
    }
  }
  return true;
}

void DisplaceableTaps::Add(Held& tap) {
  std::lock_guard<std::mutex> lock(mutex_);
  taps_[tap.stream].push_back(&tap);
}

void DisplaceableTaps::Remove(Held& tap) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::list<Held*>& taps = taps_[tap.stream];
  // Jobs run in order, so it is the oldest, or gone.
  const auto found = std::find(taps.begin(), taps.end(), &tap);
  if (found != taps.end()) taps.erase(found);
}

PinnedBlock DisplaceableTaps::TakeOldest(CudaStream stream, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::list<Held*>& taps = taps_[stream];
  const auto found = std::find_if(taps.begin(), taps.end(), [bytes](Held* tap) {
    return tap->block.capacity() >= bytes;
  });
  if (found == taps.end()) return {};
  Held& tap = **found;
  taps.erase(found);
  return std::move(tap.block);
}

namespace {

/// What a tap needs on the driver's thread. Members are destroyed in reverse order,
/// so everything that the receiver holds is gone before the block goes back, which
/// makes no CUDA call: it takes only the pool's lock.
struct TapJob : TapStreams::Job {
  DisplaceableTaps* displaceable = nullptr;  ///< null: it is none of these
  DisplaceableTaps::Held held;
  std::vector<void*> data;
  Receiver receiver;

  void Run() override {
    if (displaceable != nullptr) {
      displaceable->Remove(held);
      if (!held.block) return receiver.lose();  // a newer tap has it
    }
    try {
      receiver.deliver(data.data());
    } catch (...) {
      receiver.lose();
    }
  }
};

}  // namespace

void StageTap(PinnedPool& pool, TapStreams& streams, CudaStream stream,
              const std::vector<Span>& spans, PoolIsFull full, Receiver receiver) {
  ScopedContext current(stream);
  auto job = std::make_unique<TapJob>();
  job->receiver = std::move(receiver);
  job->held.stream = stream;
  const bool may_displace = full == PoolIsFull::kLoseOldest;
  const auto acquire = [&](size_t bytes) {
    PinnedBlock block = pool.Acquire(bytes, full == PoolIsFull::kWait);
    if (block || !may_displace) return block;
    return streams.displaceable.TakeOldest(stream, bytes);
  };
  if (!Place(stream, spans, acquire, job->held.block, job->data)) {
    return job->receiver.lose();
  }
  if (may_displace && job->held.block) job->displaceable = &streams.displaceable;
  TapJob& tap = *job;
  std::unique_ptr<TapStreams::Job> owner = std::move(job);
  bool enqueued = false;
  try {
    CopyToHost(stream, spans, spans.size(), tap.data, &enqueued);
    if (tap.displaceable != nullptr) tap.displaceable->Add(tap.held);
    streams.RunBehind(current.context(), stream, owner);
  } catch (...) {
    if (tap.displaceable != nullptr) tap.displaceable->Remove(tap.held);
    ReleaseQuietly(tap.held.block, enqueued, stream);
    throw;
  }
}

// --- Copies without the host ----------------------------------------------------

void CopyOnStream(CudaStream on, void* to, const void* from, size_t bytes,
                  std::optional<uintptr_t> made_on) {
  const bool same_stream = made_on && *made_on == reinterpret_cast<uintptr_t>(on);
  ScopedContext current(on);
  if (!made_on || *made_on == 0) {  // any stream may still be writing the source
    Driver().Check(Driver().cuCtxSynchronize(), "cuCtxSynchronize");
  } else if (!same_stream) {
    // 1 and 2 stand for the default streams, and are valid handles for the driver:
    // CU_STREAM_LEGACY and CU_STREAM_PER_THREAD.
    const auto source_stream = reinterpret_cast<CudaStream>(*made_on);
    Driver().Synchronize(source_stream);
  }
  Driver().CopyOnDevice(on, to, from, bytes);
  // The source's owner orders its reuse on its own stream, not on this one, and may
  // free it as soon as this returns. On the same stream the reuse comes after the
  // copy anyway.
  if (!same_stream) Driver().Synchronize(on);
}

}  // namespace hostcall
