#include "cuda/tap_streams.h"

#include <chrono>
#include <thread>

namespace hostcall {
namespace {

/// Time between two looks of Await: what a barrier may take longer than its taps.
constexpr std::chrono::microseconds kPoll{50};

}  // namespace

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

}  // namespace hostcall
