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
// A full queue and its relief. Admission is a compare-and-swap on the number of
// bytes, before the event is written: the limit holds at every moment, and only
// what is let in is counted.
//
//   1. device: reads bytes_, finds too many; locks space_, adds itself to its
//              waiters, then reads bytes_ again
//   2. worker: subtracts from bytes_, then reads the waiters
//
// All four are sequentially consistent: either the device reads the smaller number,
// or the worker sees a waiter, takes the lock (so the device is asleep) and wakes
// it.
//
// The sleep of the worker. A wake-up costs the device a system call. And every time
// that the worker takes the GIL from a Python thread that dispatches programs, it
// costs that thread some 300 us (measured: 24 us a dispatch with naps of 1 ms, 9 us
// with 5 ms). So a worker that has emptied the queue naps before it looks again,
// and then finds more at once. A flush, a push that waits for space, and a queue
// longer than kWakeBytes end the nap. After kAwake of naps in vain the worker
// sleeps until it is woken:
//
//   1. device: links its event (under the lane's lock), then reads rest_
//   2. worker: sets rest_ to kAsleep, then looks into the lanes
//
// All of these are sequentially consistent, so at least one sees the other: the
// device wakes the worker, or the worker finds the event. The end of a nap is
// decided in the same way, with bytes_ and flushing_ in place of the lanes
// (Hurried).
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
#include <stdexcept>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/no_copy.h"
#include "queue/tap_lane.h"

namespace hostcall {

/// What a push does if the queue is full.
enum class WhenFull {
  kBlock,       ///< waits for space
  kDropNewest,  ///< drops its own event
  kDropOldest,  ///< drops older events of its lane that have this policy too
};

/// How a push went.
struct Pushed {
  int64_t sequence = -1;  ///< the event's position in the queue; -1: it was dropped
  int64_t waited = 0;     ///< ticks of waiting for space
  bool queued() const { return sequence >= 0; }
};

/// Whether the calling thread is the one that delivers taps. A tap that it pushes
/// (from inside a delivery) must never wait for space, since only this thread makes
/// space.
inline thread_local bool t_delivers_taps = false;

/// Thrown by a push that was interrupted while it waited for space.
struct PushInterrupted : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Where pushes wait for space in a full queue.
///
/// Guarantee: a waiter misses neither Freed nor Interrupt. Freed is called for
/// every delivered batch, so it must be cheap when nobody waits: it reads one
/// atomic and takes the lock only if there is a waiter. Why no wake-up is lost:
///
///   1. device: takes the lock, adds itself to waiters_, then evaluates enough()
///   2. worker: makes more space, then Freed reads waiters_
///
/// Both sides use sequentially consistent operations. Either the worker reads the
/// waiter, takes the lock (the device is asleep by then, since only sleeping
/// releases the lock) and wakes it; or the worker read waiters_ too early, and then
/// the device evaluates enough() after the space was made.
class TapSpace {
 public:
  /// Waits until `enough()` is true; it is evaluated under the lock, at once and
  /// after each Freed, and must read what Freed announces with sequentially
  /// consistent loads. Throws PushInterrupted if Interrupt ends the wait.
  template <typename Enough>
  void Wait(Enough enough) {
    std::unique_lock<std::mutex> lock(mutex_);
    // A count, not a flag: an interrupt ends the waits that had begun by then, and
    // no later ones, without anybody having to reset it.
    const int64_t before = interrupts_;
    waiters_.fetch_add(1);
    changed_.wait(lock, [&] { return enough() || interrupts_ != before; });
    waiters_.fetch_sub(1);
    if (interrupts_ != before) throw PushInterrupted(text_);
  }

  /// Wakes the waiters. Called after there is more space, or when waiting has
  /// become pointless.
  void Freed() {
    if (waiters_.load() == 0) return;
    std::lock_guard<std::mutex> lock(mutex_);
    changed_.notify_all();
  }

  /// Ends the waits that are under way; they throw PushInterrupted(text). Returns
  /// whether there was one: waiters are counted under the lock, so a device that
  /// was just between two waits is not taken for one.
  bool Interrupt(std::string text) {
    std::lock_guard<std::mutex> lock(mutex_);
    ++interrupts_;
    text_ = std::move(text);
    changed_.notify_all();
    return waiters_.load() > 0;
  }

  int64_t waiters() const { return waiters_.load(); }

 private:
  /// Threads inside Wait. Changed under the lock; Freed reads it without.
  std::atomic<int64_t> waiters_{0};
  // Guards the fields below. Taken by devices that find the queue full, by whoever
  // frees space while a device waits, and by Interrupt; never while a lane is
  // locked.
  std::mutex mutex_;
  std::condition_variable changed_;
  int64_t interrupts_ = 0;  ///< calls of Interrupt so far
  std::string text_;        ///< what the last Interrupt said
};

class TapQueue {
 public:
  static constexpr int kLanes = 64;
  static constexpr size_t kMostAtOnce = 256;

  /// The queue of the process.
  static TapQueue& Get() { return Immortal<TapQueue>(); }
  /// `awake` is how long the worker naps in vain before it sleeps.
  explicit TapQueue(std::chrono::microseconds awake = kAwake) : awake_(awake) {}

  // --- For devices

  /// Queues an event of `bytes` payload bytes, which `fill(char*)` writes, maybe
  /// under a lock. `run` is XLA's number of the execution; `nested` says that the
  /// push comes from inside a delivery, or that its thread must not wait. Throws
  /// std::bad_alloc or PushInterrupted.
  template <typename Fill>
  Pushed Push(int device, int64_t run, TapOwner& owner, size_t bytes,
              WhenFull when_full, bool nested, Fill fill) {
    Pushed pushed;
    TapLane& lane = LaneOf(device);
    UseLane(static_cast<int>(&lane - lanes_));
    const size_t lines = TapEvent::LinesFor(bytes);
    if (lines > std::numeric_limits<uint32_t>::max()) throw std::bad_alloc();
    const auto charge = static_cast<int64_t>(lines * TapEvent::kLine);
    if (!Admit(lane, charge, when_full, nested, &pushed.waited)) {
      owner.counts->dropped.fetch_add(1, std::memory_order_relaxed);
      CountDropped();
      return pushed;
    }
    try {
      const bool droppable = when_full == WhenFull::kDropOldest;
      pushed.sequence = lane.Store(pool_, sequence_,
                                   {device, run, owner, lines, droppable}, fill);
    } catch (...) {  // no memory for a slab
      Free(charge);
      throw;
    }
    // Read after the event is linked: the device's half of the race with a worker
    // that goes to sleep. A napping worker is left alone, since it
    // wakes up by itself, unless the queue grows long.
    const int rest = rest_.load();
    if (rest == kAsleep || (rest == kNapping && bytes_.load() > WakeBytes()))
      Wake();
    return pushed;
  }

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

  // --- For the worker

  /// Waits for events, and takes up to `most` of one device; with kMostAtOnce, all
  /// that are queued if only one device is at work. An empty batch means that the
  /// queue was stopped and is empty.
  TapBatch Wait(size_t most) {
    std::chrono::microseconds idle{0};
    bool rested = !drained_;
    for (;;) {
      if (rested || Hurried()) {
        if (const TapBatch taken = Take(most)) return taken;
      }
      std::unique_lock<std::mutex> lock(wake_mutex_);
      if (stopped_) {  // what was pushed before Stop is in its lane by now
        lock.unlock();
        return Take(most);
      }
      if (idle < awake_) {
        // Hurried is asked after rest_ is set, see above. A Wake that comes in
        // between waits for the mutex, and sets rest_ once wait_for has released
        // it.
        rest_.store(kNapping);
        if (!Hurried()) {
          wake_.wait_for(lock, kNap, [this] { return rest_.load() == kAwakeNow; });
        }
        rest_.store(kAwakeNow);
        idle += kNap;
        rested = true;
        continue;
      }
      rest_.store(kAsleep);
      // The lanes are locked without wake_mutex_, so that a device in Wake does not
      // wait for a device in Push. A Wake in the gap sets rest_, which wait()
      // checks first.
      lock.unlock();
      const TapBatch taken = Take(most);
      lock.lock();
      if (!taken) {
        wake_.wait(lock, [this] { return rest_.load() == kAwakeNow || stopped_; });
        idle = std::chrono::microseconds(0);
      }
      rest_.store(kAwakeNow);
      if (taken) return taken;
    }
  }

  /// Ends the delivery of a batch's events from `first` up to, but without, `rest`;
  /// null means all up to the end. Their memory must not be used afterwards.
  void Finish(TapEvent* first, TapEvent* rest) {
    TapLane& lane = LaneOf(first->device);
    int64_t charge = 0, events = 0;
    for (TapEvent* event = first; event != rest;) {
      // Neighbours mostly have the same owner. Its count is a cache line that
      // devices write too, so it is changed once for all of them.
      TapOwner* owner = event->owner;
      int64_t of_owner = 0;
      for (; event != rest && event->owner == owner; event = event->next) {
        charge += event->charge();
        ++of_owner;
      }
      owner->Release(of_owner);
      events += of_owner;
    }
    // In this order: a Flush ends when the lane says that nothing is under way, and
    // who flushed may then read `delivered` and `bytes`.
    delivered_.fetch_add(events, std::memory_order_relaxed);
    Free(charge);
    lane.Finish(pool_, first, rest);
    // A Flush that begins after this load looks at the lanes itself. Locking lets
    // one that has just looked get to sleep before it is notified.
    if (flushing_.load() != 0) {
      std::lock_guard<std::mutex> lock(flush_mutex_);
      flushed_.notify_all();
    }
  }

  /// Puts the rest of a batch back at the head of its lane. A slow worker does so
  /// that drop_oldest can reach these events.
  void GiveBack(TapBatch rest) {
    LaneOf(rest.first->device).GiveBack(rest);
    drained_ = false;
  }

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

  /// A number above the sequence of every event pushed so far.
  int64_t Mark() const { return sequence_.load(); }

  /// Waits until all events before `mark` are done, for at most `seconds`. Returns
  /// whether they are. The caller does not hold the GIL: the worker needs it.
  bool Flush(int64_t mark, double seconds) {
    const auto until = std::chrono::steady_clock::now() +
                       std::chrono::duration_cast<std::chrono::nanoseconds>(
                           std::chrono::duration<double>(seconds));
    // From here on the worker neither naps nor forgets to notify.
    flushing_.fetch_add(1);
    Wake();
    bool done;
    {
      std::unique_lock<std::mutex> lock(flush_mutex_);
      while (!(done = DoneBefore(mark)) &&
             std::chrono::steady_clock::now() < until) {
        // In slices, since dropping an event notifies nobody.
        flushed_.wait_for(lock, std::chrono::milliseconds(10));
      }
    }
    flushing_.fetch_sub(1);
    return done;
  }

  /// Drops what is queued.
  void Discard() {
    const int64_t mark = Mark();
    // Before the lanes are emptied, for the events that the worker has already
    // taken: it asks IsDiscarded before each delivery.
    discarded_before_.store(mark);
    for (TapLane& lane : lanes_) {
      int64_t events = 0;
      const int64_t charge = lane.DropBefore(pool_, mark, &events);
      CountEvicted(events);
      if (charge != 0) Free(charge);
    }
    Wake();
  }

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
  /// How the worker rests.
  enum Rest { kAwakeNow, kNapping, kAsleep };
  static constexpr std::chrono::microseconds kNap{5'000};  ///< length of a nap
  /// Naps before it sleeps.
  static constexpr std::chrono::microseconds kAwake{60'000};
  static constexpr int64_t kWakeBytes = 1 << 20;  ///< this much queued ends a nap

  TapLane& LaneOf(int device) {
    return lanes_[static_cast<unsigned>(device + 1) % kLanes];  // -1 is eager
  }
  /// Makes the worker look at this lane from now on. Called before the lane's first
  /// event is linked, so that no event lies in a lane that the worker skips.
  ///
  /// Sequentially consistent, also for a device that finds its lane in use already:
  ///
  ///   1. device A: adds the lane to lanes_used_
  ///   2. device B: reads that, links an event, then reads rest_
  ///   3. worker:   sets rest_ to asleep, then reads lanes_used_, looks at the
  ///   lanes
  ///
  /// If the worker read the old number, its read comes before 1 in the one order of
  /// such operations. B's read comes after 1, and B's read of rest_ after that, so
  /// B finds the worker asleep and wakes it. A weaker read of B's has no place in
  /// that order: both could read the old values, and the event would lie there
  /// until the next push. It costs nothing on x86, and a load-acquire on Arm.
  void UseLane(int number) {
    int used = lanes_used_.load();
    while (used <= number && !lanes_used_.compare_exchange_weak(used, number + 1)) {
    }
  }

  static int64_t ChargeOf(size_t bytes) {
    return static_cast<int64_t>(TapEvent::LinesFor(bytes) * TapEvent::kLine);
  }
  bool Fits(int64_t before, int64_t charge) const {
    return before + charge <= limit_.load() || before == 0;
  }
  /// Reserves `charge` bytes, by the policy if the queue is full. False: the event
  /// is to be dropped. Adds the ticks of waiting to `*waited`.
  bool Admit(TapLane& lane, int64_t charge, WhenFull when_full, bool nested,
             int64_t* waited) {
    for (;;) {
      int64_t before = bytes_.load();
      const bool anyway = nested && when_full == WhenFull::kBlock;
      while (anyway || Fits(before, charge)) {
        if (bytes_.compare_exchange_weak(before, before + charge)) return true;
      }
      switch (when_full) {
        case WhenFull::kDropNewest:
          return false;
        case WhenFull::kDropOldest:
          // Such an event fits only an empty queue. Dropping all that this lane may
          // drop is rarely enough for that, so the others would go in vain.
          if (charge > limit_.load()) return false;
          // If nothing could be dropped, space may still have been freed meanwhile.
          if (!DropOne(lane) && !Fits(bytes_.load(), charge)) return false;
          break;
        case WhenFull::kBlock:
          const int64_t start = Ticks();
          WaitForSpace(charge);
          *waited += std::max<int64_t>(Ticks() - start, 1);
          if (stopped_.load()) return false;
      }
    }
  }
  /// Returns when `charge` would fit, or the queue is stopped. Another push may
  /// take the space first, so the caller tries again.
  void WaitForSpace(int64_t charge) {
    Wake();  // a napping worker would let the device wait for the rest of its nap
    space_.Wait([&] { return Fits(bytes_.load(), charge) || stopped_.load(); });
  }
  /// Drops the oldest droppable event of the lane. False if it finds none.
  bool DropOne(TapLane& lane) {
    const int64_t charge = lane.DropOldest(pool_);
    if (charge == 0) return false;
    CountEvicted(1);
    Free(charge);
    return true;
  }
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

  /// Takes a batch from the lane with the oldest event; empty if all lanes are.
  TapBatch Take(size_t most) {
    for (;;) {
      const int oldest = Oldest(-1);
      drained_ = oldest < 0;
      if (oldest < 0) return {};
      int64_t second = TapLane::kNone;
      const TapBatch batch = lanes_[oldest].Take(most, most >= kMostAtOnce, [&] {
        const int next = Oldest(oldest);
        if (next >= 0) second = lanes_[next].first();
        return second;
      });
      // The lane's head was dropped before it was locked, or another lane's is
      // older.
      if (!batch) continue;
      drained_ = second == TapLane::kNone && lanes_[oldest].first() == second;
      return batch;
    }
  }
  /// The lane with the oldest head, leaving out lane `but`; -1 if all are empty.
  /// Reads without locks: Take confirms the answer under the lane's lock.
  int Oldest(int but) const {
    int oldest = -1;
    int64_t first = TapLane::kNone;
    const int used = lanes_used_.load();
    for (int i = 0; i < used; ++i) {
      const int64_t head = lanes_[i].first();
      if (i == but || head >= first) continue;
      first = head;
      oldest = i;
    }
    return oldest;
  }
  /// Whether the worker should not nap: somebody waits for it, or will soon.
  bool Hurried() const {
    return flushing_.load() != 0 || stopped_.load() || bytes_.load() > WakeBytes();
  }
  /// Ends the worker's rest.
  void Wake() {
    // Under the lock, or the notification could fall between the worker's check of
    // rest_ and its wait, and be lost.
    std::lock_guard<std::mutex> lock(wake_mutex_);
    rest_.store(kAwakeNow);
    wake_.notify_all();
  }
  /// Bytes in the queue that end a nap.
  int64_t WakeBytes() const { return std::min(limit_.load() / 2, kWakeBytes); }
  bool DoneBefore(int64_t mark) {
    return std::all_of(std::begin(lanes_), std::end(lanes_),
                       [mark](TapLane& lane) { return lane.DoneBefore(mark); });
  }

  TapLane lanes_[kLanes];
  SlabPool pool_;
  // Orders. Those of bytes_, flushing_, rest_, stopped_ and lanes_used_ are
  // sequentially consistent, for the sleep of the worker and of devices (above).
  // sequence_, limit_ and discarded_before_ are so too, and need less: sequence_ is
  // drawn under a lane's lock, and a mark that was set before another thread looks
  // is seen by it, in any order. Counts are added to with relaxed order: they
  // publish nothing.
  //
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
  const std::chrono::microseconds awake_;
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
