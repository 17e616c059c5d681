// Taps on their way from the devices to the worker that delivers them.
//
// Does not depend on Python, so that ThreadSanitizer can watch it alone
// (tests/native/tap_queue_test.cc).
//
// Parties. Devices push: any number of threads of XLA and of the CUDA driver. One
// worker takes and finishes batches. Python threads flush, discard and set limits.
//
// Guarantees
//   * Order. The events of one device are delivered in the order of their pushes.
//     Events of two devices are delivered in the order of their pushes if one push
//     returned before the other began; otherwise in either order.
//   * Loss. An event is either delivered, or dropped and counted: by its policy, by
//     Discard, or because the queue was stopped.
//   * Memory. The bytes of all events that are queued or being delivered stay
//     within the limit, with two exceptions. An event larger than the limit is let
//     in when the queue is empty. A nested push (from inside a delivery) that is to
//     block is let in at once: it would wait for space that only its own worker can
//     make.
//   * Speed. In the steady state Push allocates nothing and takes one lock, which
//     is its lane's. It waits for Python only if the queue is full and its policy
//     is kBlock.
//   * Flush returns true once everything that was pushed before its mark has been
//     delivered or dropped.
//   * Discard drops what was pushed before it was called, except the one event that
//     is being delivered. None of it is delivered after Discard has returned.
//   * Interrupt ends every wait for space that had begun when it was called: that
//     Push throws PushInterrupted, and its event is neither queued nor counted.
//
// Assumptions. The worker is one thread. Owners of events outlive their push call.
//
// Order between devices. The lanes (tap_lane.h) are independent, and a sequence
// number that all share orders their events. When a push returns, its event is
// visible in its lane. So the worker takes from the lane with the oldest head,
// looks at the heads of the other lanes while it holds that lane's lock, and takes
// nothing younger than they are.
//
// The two races of the queue are told where their code is: a full queue and its
// relief in tap_admission.h, the sleep of the worker in tap_delivery.h. These
// headers hold the longer members, and are included below.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <mutex>
#include <new>
#include <string>
#include <utility>

#include "base/clock.h"
#include "queue/slab_pool.h"
#include "queue/tap_lane.h"
#include "queue/tap_space.h"

namespace hostcall {

/// What a push does if the queue is full.
enum class WhenFull {
  kBlock,       ///< waits for space
  kDropNewest,  ///< drops its own event
  kDropOldest,  ///< drops older events of its lane that have this policy too
};

/// How a push went.
struct Pushed {
  int64_t sequence =
      -1;              ///< the event's position in the queue; -1 if it was dropped
  int64_t waited = 0;  ///< ticks of waiting for space
};

class TapQueue {
 public:
  static constexpr int kLanes = 64;
  static constexpr size_t kMostAtOnce = 256;

  /// The queue of the process. Never destroyed: threads of XLA may push during
  /// static destruction.
  static TapQueue& Get() {
    static TapQueue* queue = new TapQueue;
    return *queue;
  }

  /// Only for the queues of tests, which are empty by then.
  ~TapQueue() {
    for (TapLane& lane : lanes_) lane.GiveSlabTo(pool_);
  }

  // --- For devices (tap_admission.h)
  // ----------------------------------------------

  /// Queues an event of `bytes` payload bytes, which `fill(char*)` writes, maybe
  /// under a lock. Returns false if the event was dropped. `run` is XLA's number of
  /// the execution; `nested` says that the push comes from inside a delivery, or
  /// that its thread must not wait. `pushed`, if not null, learns how it went.
  /// Throws std::bad_alloc or PushInterrupted.
  template <typename Fill>
  bool Push(int device, int64_t run, TapOwner& owner, size_t bytes,
            WhenFull when_full, bool nested, Fill fill, Pushed* pushed = nullptr);

  /// Whether an event of `bytes` would be let in now.
  bool HasSpace(size_t bytes) const { return Fits(bytes_.load(), ChargeOf(bytes)); }

  /// Waits until it would be, but reserves nothing. For a push that follows on a
  /// thread that must not wait, such as the CUDA driver's. Throws PushInterrupted.
  void AwaitSpace(size_t bytes) { WaitForSpace(ChargeOf(bytes)); }

  /// Ends the waits for space that are under way; they throw PushInterrupted(text).
  /// Returns whether there was one.
  bool Interrupt(std::string text) { return space_.Interrupt(std::move(text)); }

  /// Counts an event that was given up before it was pushed.
  void CountDropped() { dropped_.fetch_add(1, std::memory_order_relaxed); }

  // --- For the worker (tap_delivery.h)
  // --------------------------------------------

  /// Waits for events, and takes up to `most` of one device; with kMostAtOnce, all
  /// that are queued if only one device is at work. An empty batch means that the
  /// queue was stopped and is empty.
  TapBatch Wait(size_t most);

  /// Ends the delivery of a batch's events from `first` up to, but without, `rest`;
  /// null means all up to the end. Their memory must not be used afterwards.
  void Finish(TapEvent* first, TapEvent* rest);

  /// Puts the rest of a batch back at the head of its lane. A slow worker does so
  /// that drop_oldest can reach these events.
  void GiveBack(TapBatch rest);

  /// Whether Discard was called after this event was pushed. The worker asks before
  /// each delivery.
  bool IsDiscarded(const TapEvent& event) const {
    return event.sequence < discarded_before_.load();
  }

  /// Counts a discarded event that the worker had already taken, before its Finish.
  void CountDiscarded(const TapEvent& event) {
    event.owner->counts->dropped.fetch_add(1, std::memory_order_relaxed);
    CountEvicted(1);
    // Finish counts every event of the batch as delivered, this one too.
    delivered_.fetch_sub(1, std::memory_order_relaxed);
  }

  // --- For everybody
  // ---------------------------------------------------------------

  /// A number above the sequence of every event pushed so far.
  int64_t Mark() const { return sequence_.load(); }

  /// Waits until all events before `mark` are done, for at most `seconds`. Returns
  /// whether they are. The caller does not hold the GIL: the worker needs it.
  bool Flush(int64_t mark, double seconds);

  /// Drops what is queued.
  void Discard();

  /// Sets the limit in bytes. What is queued above a lower limit stays.
  void SetLimit(int64_t bytes) {
    limit_.store(bytes);
    pool_.set_most_cached(static_cast<size_t>(bytes / 2));
    Free(0);  // a waiting push may fit now
  }

  /// Ends the queue: pushes no longer wait for space, and Wait returns what is
  /// queued and then an empty batch.
  void Stop() {
    {
      std::lock_guard<std::mutex> lock(wake_mutex_);
      stopped_ = true;
      wake_.notify_all();
    }
    space_.Freed();
  }

  /// Whether Stop was called.
  bool stopped() const { return stopped_.load(); }

  // Statistics. Each is exact by itself; two of them may be of different moments.
  int64_t limit() const { return limit_.load(); }
  int64_t bytes() const { return bytes_.load(); }
  int64_t delivered() const { return delivered_.load(); }
  int64_t dropped() const { return dropped_.load(); }
  int64_t pushed() const { return sequence_.load(); }
  int64_t pending() const { return pushed() - delivered() - evicted_.load(); }
  int64_t blocked() const { return space_.waiters(); }

 private:
  /// How the worker rests (tap_delivery.h).
  enum Rest { kAwakeNow, kNapping, kAsleep };
  static constexpr std::chrono::microseconds kNap{5'000};  ///< length of a nap
  static constexpr std::chrono::microseconds kAwake{
      60'000};                                    ///< naps before it sleeps
  static constexpr int64_t kWakeBytes = 1 << 20;  ///< this much queued ends a nap

  TapLane& LaneOf(int device) {
    return lanes_[static_cast<unsigned>(device + 1) % kLanes];  // -1 is eager
  }
  void UseLane(int number);

  static int64_t ChargeOf(size_t bytes) {
    return static_cast<int64_t>(TapEvent::LinesFor(bytes) * TapEvent::kLine);
  }
  bool Fits(int64_t before, int64_t charge) const {
    return before + charge <= limit_.load() || before == 0;
  }
  bool Admit(TapLane& lane, int64_t charge, WhenFull when_full, bool nested,
             int64_t* waited);
  void WaitForSpace(int64_t charge);
  bool DropOne(TapLane& lane);
  /// Takes the charge of events off the queue, and wakes pushes that wait for
  /// space.
  void Free(int64_t charge) {
    bytes_.fetch_sub(charge);
    space_.Freed();
  }
  void CountEvicted(int64_t events) {
    evicted_.fetch_add(events, std::memory_order_relaxed);
    dropped_.fetch_add(events, std::memory_order_relaxed);
  }

  TapBatch Take(size_t most);
  int Oldest(int but) const;
  bool Hurried() const;
  void Wake();
  /// Bytes in the queue that end a nap.
  int64_t WakeBytes() const { return std::min(limit_.load() / 2, kWakeBytes); }
  bool DoneBefore(int64_t mark) {
    return std::all_of(std::begin(lanes_), std::end(lanes_),
                       [mark](TapLane& lane) { return lane.DoneBefore(mark); });
  }

  TapLane lanes_[kLanes];
  SlabPool pool_;
  // Every push writes these two, so each begins a cache line. What stands behind
  // bytes_ shares its line: a push reads most of it anyway.
  alignas(64) std::atomic<int64_t> sequence_{0};  ///< of the next event
  alignas(64) std::atomic<int64_t> bytes_{0};     ///< charges queued or in delivery
  std::atomic<int64_t> limit_{256'000'000};       ///< bound on bytes_
  std::atomic<int64_t> flushing_{0};              ///< threads inside Flush
  std::atomic<int64_t> delivered_{0};             ///< events that were delivered
  std::atomic<int64_t> dropped_{0};               ///< events dropped, queued or not
  std::atomic<int64_t> evicted_{0};   ///< events dropped after they were queued
  std::atomic<int> rest_{kAwakeNow};  ///< a Rest; the worker's, and Wake's
  std::atomic<bool> stopped_{false};  ///< never reset
  std::atomic<int> lanes_used_{0};  ///< lanes from here on have never had an event
  /// Whether the worker's last look emptied the queue. Only the worker uses it.
  bool drained_ = false;
  std::atomic<int64_t> discarded_before_{0};  ///< the mark of the last Discard
  TapSpace space_;
  // wake_mutex_ belongs to wake_: the worker rests under it, and whoever changes
  // rest_ or stopped_ from outside holds it. flush_mutex_ belongs to flushed_.
  // Neither guards data that is not atomic. A lane may be locked under
  // flush_mutex_, and no other lock under either. The worker locks them with the
  // GIL held, so nobody may ask for the GIL while holding one.
  std::mutex wake_mutex_, flush_mutex_;
  std::condition_variable wake_, flushed_;
};

}  // namespace hostcall

#include "queue/tap_admission.h"
#include "queue/tap_delivery.h"
