// Moves values between a device and the host: copies on XLA's stream, through
// pinned memory, before and after the same call into Python that the CPU makes. At
// the end stand what the process has for that, and copies without the host.
//
// Does not depend on Python or XLA (tests/native/staging_test.cc).
//
// Guarantees
//   * A call waits for the device exactly once, for the copies of its operands, and
//     not at all if its operands have no bytes. Its results are copied after the
//     function has returned, and nobody waits for that.
//   * A tap never waits for the device, unless the pool is full and `may_wait` is
//     set. The device never waits for a tap: on XLA's stream it only finds a copy
//     and an event (TapStreams). The taps of one device are delivered in the
//     order of their StageTap calls. They may be delivered after the program has
//     ended.
//   * Each call or tap takes one block of pinned memory. Whatever fails, the block
//     goes back to the pool once the device no longer uses it (pinned_pool.h says
//     why that can't deadlock, and why nothing is overwritten).
//   * No pageable memory is copied: the driver would copy it through a buffer of
//     its own, and wait for the device.
//   * The caller needs no current context.
//
// Why one wait is enough. When the function runs, the copies of its operands must
// have ended; on the stream they stand behind all work that made the operands.
// Earlier work on the stream may still use the memory of the results. But only the
// copies of Store write there, and they stand behind that work too. (It follows
// that a function without operands runs when it is dispatched, maybe ahead of the
// device.)
//
// CUDA graphs. A stream that is being captured is refused before anything is
// enqueued. A call's function would run once, at capture, and not when the graph
// runs. A tap's function would run with each run of the graph, on a block that has
// long been reused.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "base/no_copy.h"
#include "cuda/cuda_driver.h"
#include "cuda/pinned_pool.h"

namespace hostcall {

/// A piece of a device's memory; not owned.
struct Span {
  void* device;
  size_t bytes;
};

/// One call of a function on the host:
///
///   StagedCall call(pool, stream, operands, results);
///   call.Fetch();
///   Invoke(call.operands(), call.results());
///   call.Store();  // not if Invoke failed: the destructor returns the block
///
/// All members may throw CudaError. All are called on one thread.
class StagedCall : NoCopy {
 public:
  /// Takes a block for all values; waits if the pool is full.
  StagedCall(PinnedPool& pool, CudaStream stream, std::vector<Span> operands,
             const std::vector<Span>& results);
  ~StagedCall();

  /// Copies the operands to the host, and waits for the copies.
  void Fetch();

  /// Addresses on the host, aligned to 64 bytes, never null; valid until Store.
  const void* const* operands() const { return data_.data(); }
  void* const* results() const { return data_.data() + n_operands_; }

  /// Enqueues the copies of the results to the device, and returns the block behind
  /// them. Does not wait.
  void Store();

 private:
  const CudaStream stream_;
  const size_t n_operands_;
  std::vector<Span> spans_;  ///< of the operands, then of the results
  PinnedBlock block_;        ///< empty if there are no bytes, and after Store
  std::vector<void*> data_;  ///< the host's address of each span
  bool in_flight_ = false;   ///< some enqueued copies may not have ended
};

/// Streams of hostcall's own, one for each device, on which the host functions of
/// taps run. Safe to use from several threads. Streams and events are never
/// destroyed: the driver's threads use them until the process ends.
///
/// A host function on XLA's stream would stop the device until the driver's thread
/// has run it: 25 us a tap on an H200, where the copy of a scalar takes 2. So XLA's
/// stream only records an event behind the copies of a tap, and goes on; a stream
/// of hostcall's waits for the event, and runs the function. That costs the
/// dispatching thread 3 us, and the device nothing.
///
/// Guarantees
///   * Functions of one device run one after the other, in the order of the calls
///     of RunBehind, each when what was enqueued on its stream before has ended.
///   * After an error of the whole context its functions never run. Await then does
///     not wait for them.
///
/// The lock. Two threads may enqueue on one device. The lock keeps the recording of
/// an event and the wait for it together, since the event is one for each device.
/// It is held during calls of the driver, which may wait for host functions to
/// return; these never take it.
class TapStreams : NoCopy {
 public:
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

  std::mutex mutex_;
  std::map<CudaContext, Behind> behind_;
};

/// Gets a tap's values, or learns that they are lost.
struct Receiver {
  /// Receives the values: their addresses on the host, aligned to 64 bytes, valid
  /// while it runs.
  ///
  /// It runs on a thread of the driver. It must not call CUDA, nor wait for a
  /// thread that does: the taps of all devices go on only when it returns. It
  /// should do no more than copy the values into a queue.
  std::function<void(const void* const* data)> deliver;
  /// Called in place of `deliver` if the values can't be sent, or after it has
  /// thrown: above it are only frames of the driver, which an exception must not
  /// cross, and the program that sent the tap has gone on. It counts the loss; it
  /// must not throw, and may do no more than `deliver` may.
  std::function<void()> lose;
};

/// Sends values to the host, where the receiver gets them when the device reaches
/// this point of the stream. They are lost, and nothing is enqueued, if the pool is
/// full and `may_wait` is not set. Throws CudaError; the receiver is then never
/// called.
///
/// After an error of the whole context the driver calls no host functions any more:
/// the values and the block are then lost with the context.
void StageTap(PinnedPool& pool, TapStreams& streams, CudaStream stream,
              const std::vector<Span>& spans, bool may_wait, Receiver receiver);

/// What the process has for its GPUs.
struct Gpus {
  static Gpus& Get() { return Immortal<Gpus>(); }

  /// The pinned memory of calls and of taps, which use it once Driver() has
  /// returned. There are two pools because a tap holds its block until its device
  /// has reached it, and a call must not wait for that.
  PinnedPool for_calls{1'000'000'000};
  PinnedPool for_taps{256'000'000};
  TapStreams streams;  ///< of taps
};

/// Copies inside a GPU's memory, on the stream `on`. `made_on` is the stream on
/// which the source was made. If it is another one, this waits for that stream
/// before the copy, and for the copy. If it is unknown (null, or 0, which is
/// ambiguous), this waits for all work of the current context instead, and for the
/// copy. Throws CudaError.
void CopyOnStream(CudaStream on, void* to, const void* from, size_t bytes,
                  std::optional<uintptr_t> made_on);

}  // namespace hostcall
