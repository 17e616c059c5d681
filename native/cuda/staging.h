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
//   * A tap never waits for the device, unless the pool is full and the tap is told
//     to wait. The device never waits for a tap: on XLA's stream it only finds a
//     copy and an event (TapStreams). The taps of one device are delivered in the
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

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
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

/// Which taps a wait is for.
enum class WaitFor {
  kAllTaps,      ///< those that were sent so far
  kReachedTaps,  ///< of each device whose stream has reached all that were sent
};

/// Taps on their way to the host that a newer one may displace.
///
/// The pool can't get such a tap's block back before the device reaches it, since
/// the copies into the block are enqueued. But a newer tap of the same stream can
/// have it at once: its copies are enqueued behind those, and so its values stay.
///
///   1. older tap's thread: enqueues its copies, adds the tap here, enqueues its
///   job
///   2. newer tap's thread: takes the block out of the tap, enqueues its copies
///   3. driver's thread:    runs the older tap's job: it has no block, and is lost
///
/// If 3 comes before 2, the job takes its tap out of the list under the lock before
/// it reads the block, and the newer tap doesn't find it. Taps of another stream
/// are left alone: no order holds between the copies.
///
/// The lock. Host functions take it, so it is held for operations on the list only.
class DisplaceableTaps : NoCopy {
 public:
  /// A tap's block. It is the list's while the tap is in it, else the holder's.
  struct Held {
    CudaStream stream = nullptr;
    PinnedBlock block;
  };

  /// Adds a tap whose copies are enqueued. It stays where it is until Remove.
  void Add(Held& tap);
  /// Takes a tap out, if it is there. Its block, if it still has it, is then its
  /// own.
  void Remove(Held& tap);
  /// The block of the oldest tap of the stream that has one of so many bytes; empty
  /// if there is none. The tap is out of the list.
  PinnedBlock TakeOldest(CudaStream stream, size_t bytes);

 private:
  std::mutex mutex_;
  std::map<CudaStream, std::list<Held*>> taps_;  ///< of each stream, oldest first
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
///   * Jobs of one device run one after the other, in the order of the calls of
///     RunBehind, each when what was enqueued on its stream before has ended.
///   * After an error of the whole context its jobs never run. Await then does not
///     wait for them.
///   * Await waits for the jobs that were given before it, and for no later ones.
///
/// Why the host function of a call may wait for the taps before it. If the call has
/// waited for XLA's stream, that stream has passed the event of each of these taps,
/// so their jobs depend on nothing that the device still has to do. Jobs of another
/// device may: its stream may stand in a collective, which needs the work that this
/// device gets behind the call. So such a wait is for kReachedTaps, and passes over
/// a device whose last event has not been reached.
///
/// The lock. Two threads may enqueue on one device. The lock keeps the recording of
/// an event and the wait for it together, since the event is one for each device.
/// It is held during calls of the driver, which may wait for host functions to
/// return; these never take it.
class TapStreams : NoCopy {
 public:
  /// What runs on a thread of the driver, once. It must not call CUDA.
  class Job {
   public:
    virtual ~Job() = default;
    virtual void Run() = 0;

   private:
    friend class TapStreams;
    /// Counts the jobs of the device that are over; set by RunBehind.
    std::atomic<int64_t>* ended_ = nullptr;
  };

  /// Runs and destroys the job on a thread of the driver, once everything that is
  /// enqueued on `stream` by now has ended. `context` is the stream's, and current.
  /// Throws CudaError; the job is then the caller's, and never runs.
  void RunBehind(CudaContext context, CudaStream stream, std::unique_ptr<Job>& job);

  /// Waits until jobs that were given before are over, at most so many seconds;
  /// false if they are not. Needs no current context. It polls: the driver has no
  /// wait with a limit.
  bool Await(double seconds, WaitFor which = WaitFor::kAllTaps);

  DisplaceableTaps displaceable;

 private:
  struct Behind {
    CudaStream stream = nullptr;
    CudaEvent event = nullptr;
    int64_t given = 0;  ///< jobs that the stream has been given
    /// Jobs that are over. The driver's threads add to it, without the lock.
    std::atomic<int64_t> ended{0};
  };

  static void RunJob(void* adopted);

  std::mutex mutex_;
  std::map<CudaContext, Behind> behind_;  ///< no entry is ever removed
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

/// What a tap does if the pool of taps is full.
enum class PoolIsFull {
  kWait,        ///< waits for a block
  kLoseNewest,  ///< the tap itself is lost
  /// A tap is lost that was sent before on the same stream, with this policy too,
  /// and has not reached the host. If there is none whose block is large enough,
  /// the tap itself is.
  kLoseOldest,
};

/// Sends values to the host, where the receiver gets them when the device reaches
/// this point of the stream. If the pool is full, `full` says what happens; if the
/// tap itself is lost, nothing is enqueued. Throws CudaError; the receiver is then
/// never called.
///
/// After an error of the whole context the driver calls no host functions any more:
/// the values and the block are then lost with the context.
void StageTap(PinnedPool& pool, TapStreams& streams, CudaStream stream,
              const std::vector<Span>& spans, PoolIsFull full, Receiver receiver);

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
