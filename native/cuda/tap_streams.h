// Streams of hostcall's own, one for each device, on which the host functions of
// taps run.
//
// A host function on XLA's stream would stop the device until the driver's thread
// has run it: 25 us a tap on an H200, where the copy of a scalar takes 2. So XLA's
// stream only records an event behind the copies of a tap, and goes on; a stream of
// hostcall's waits for the event, and runs the function. That costs the dispatching
// thread 3 us, and the device nothing.
//
// Does not depend on Python or XLA (tests/native/staging_test.cc).
//
// Guarantees
//   * Functions of one device run one after the other, in the order of the calls of
//     RunBehind, each when what was enqueued on its stream before has ended.
//   * After an error of the whole context its functions never run. Await then does
//   not
//     wait for them.
//
// The lock. Two threads may enqueue on one device. The lock keeps the recording of
// an event and the wait for it together, since the event is one for each device. It
// is held during calls of the driver, which may wait for host functions to return;
// these never take it.
#pragma once

#include <map>
#include <mutex>

#include "cuda/cuda_driver.h"

namespace hostcall {

/// Safe to use from several threads.
class TapStreams {
 public:
  /// `driver` outlives this object. Streams and events are never destroyed: the
  /// driver's threads use them until the process ends.
  explicit TapStreams(const CudaDriver& driver) : driver_(driver) {}
  TapStreams(const TapStreams&) = delete;
  TapStreams& operator=(const TapStreams&) = delete;

  /// Calls `function(data)` on a thread of the driver, once everything that is
  /// enqueued on `stream` by now has ended. `context` is the stream's, and current.
  /// Throws CudaError; the function is then never called.
  void RunBehind(CudaContext context, CudaStream stream, CudaHostFn function,
                 void* data);

  /// Waits until all functions that were given before have returned, at most so
  /// many seconds; false if they have not. Needs no current context. It polls: the
  /// driver has no wait with a limit.
  bool Await(double seconds);

 private:
  struct Behind {
    CudaStream stream = nullptr;
    CudaEvent event = nullptr;
  };

  const CudaDriver& driver_;
  std::mutex mutex_;
  std::map<CudaContext, Behind> behind_;
};

}  // namespace hostcall
