// Taps on their way from the devices to the worker.
//
// Knows no Python, so that ThreadSanitizer can watch it alone
// (tests/native/tap_queue_test.cc).
//
// Guarantees
//   * Events are delivered in the order in which they were pushed, those of one
//     device and those of several where one push ended before the other began.
//   * What is not delivered was dropped by the policy of an event, and is counted.
//   * The bytes of all events that are queued or being delivered stay within the
//     limit. An event above the limit goes through alone. Events of nested pushes
//     (from inside a delivery) are let in whatever is queued: the worker would wait
//     for itself.
//   * In the steady state Push allocates nothing, and takes one lock (tap_lane.h).
//   It never waits for Python but
//     where the queue is full and its policy says so.
//   * Flush returns true when everything has been delivered or dropped that was
//     pushed before it was called.
//   * Discard drops what was pushed before it was called, but for the one event
//   that
//     is being delivered; none of it is delivered after Discard has returned.
//   * Interrupt ends every wait for space that had begun when it was called: that
//     Push throws, and its event is neither queued nor counted.
//
// Admission is a compare-and-swap on the number of bytes: only what is let in is
// counted. The race between a full queue and its relief:
//   1. device: reads bytes_, too many; takes the mutex of space_, waiters + 1,
//   reads
//      again
//   2. worker: subtracts from bytes_, then reads waiters
// Both are sequentially consistent: either the device reads the smaller number, or
// the worker sees a waiter, takes the mutex (so the device is waiting) and wakes
// it.
//
// Waking. A wake-up costs the device a system call, and every time that the worker
// takes the interpreter's lock costs the Python thread that dispatches programs
// some 300 us (measured: 24 us a dispatch with naps of 1 ms, 9 with 5). So a worker
// that has emptied the queue naps before it looks again, and finds more at once;
// who flushes, who waits for space, and who makes the queue longer than kWakeBytes,
// end the nap. After many naps in vain it sleeps until it is woken:
//   1. device: links its event (under the lane's lock), then reads rest_
//   2. worker: sets rest_ to kAsleep, then looks into the lanes
// At least one sees the other.
//
// Between devices. An event that was pushed before another is in its lane when the
// other is. So the worker looks at the heads of the other lanes while it holds the
// lock of the one that it takes from, and takes nothing younger than they are.
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

#include "queue/slab_pool.h"
#include "queue/tap_lane.h"
#include "queue/tap_space.h"

namespace hostcall {

enum class WhenFull { kBlock, kDropNewest, kDropOldest };

class TapQueue {
 public:
  static constexpr int kLanes = 64;
  static constexpr size_t kMostAtOnce = 256;

  static TapQueue& Get() {
    static TapQueue* queue = new TapQueue;  // outlives static destruction
    return *queue;
  }

  ~TapQueue() {  // in tests: the process's own is never destroyed
    for (TapLane& lane : lanes_) lane.GiveSlabTo(pool_);
  }

  // --- Devices -------------------------------------------------------------------

  /// Takes an event in: `fill(char*)` writes its `bytes`. False: it was dropped.
  template <typename Fill>
  bool Push(int device, int64_t run, TapOwner& owner, size_t bytes,
            WhenFull when_full, bool nested, Fill fill) {
    TapLane& lane = LaneOf(device);
    UseLane(static_cast<int>(&lane - lanes_));
    const size_t lines = TapEvent::LinesFor(bytes);
    if (lines > std::numeric_limits<uint32_t>::max()) throw std::bad_alloc();
    const auto charge = static_cast<int64_t>(lines * TapEvent::kLine);
    if (!Admit(lane, charge, when_full, nested)) {
      owner.counts->dropped.fetch_add(1, std::memory_order_relaxed);
      CountDropped();
      return false;
    }
    try {
      const bool droppable = when_full == WhenFull::kDropOldest;
      lane.Store(pool_, sequence_, {device, run, owner, lines, droppable}, fill);
    } catch (...) {  // no memory
      Free(charge);
      throw;
    }
    const int rest = rest_.load();
    if (rest == kAsleep || (rest == kNapping && bytes_.load() > WakeBytes()))
      Wake();
    return true;
  }

  /// Waits until so many bytes would be let in. For a push that must not wait.
  void AwaitSpace(size_t bytes) {
    const auto charge =
        static_cast<int64_t>(TapEvent::LinesFor(bytes) * TapEvent::kLine);
    if (!Fits(bytes_.load(), charge)) WaitForSpace(charge);
  }

  void Interrupt(std::string text) { space_.Interrupt(std::move(text)); }

  /// Of an event that was given up before it was queued.
  void CountDropped() { dropped_.fetch_add(1, std::memory_order_relaxed); }

  /// Of an event that the worker forgets.
  void CountDiscarded(const TapEvent& event) {
    event.owner->counts->dropped.fetch_add(1, std::memory_order_relaxed);
    CountEvicted(1);
    delivered_.fetch_sub(1, std::memory_order_relaxed);  // Finish counts it there
  }

  // --- The worker ----------------------------------------------------------------

  /// Takes up to `most` events; all there are with kMostAtOnce, where one device is
  /// at work. Waits for the first; empty means that the queue was stopped and is.
  TapBatch Wait(size_t most) {
    std::chrono::microseconds idle{0};
    bool rested = !drained_;
    for (;;) {
      if (rested || Hurried()) {
        if (const TapBatch taken = Take(most)) return taken;
      }
      std::unique_lock<std::mutex> lock(wake_mutex_);
      if (stopped_) {  // what was pushed before that is there now
        lock.unlock();
        return Take(most);
      }
      if (idle < kAwake) {
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

  /// Ends the delivery of a batch's events from `first` up to `rest`, which is
  /// next; null at the end.
  void Finish(TapEvent* first, TapEvent* rest) {
    TapLane& lane = LaneOf(first->device);
    int64_t charge = 0, events = 0;
    for (TapEvent* event = first; event != rest;) {
      // Neighbours mostly belong together: one write to what the device writes too.
      TapOwner* owner = event->owner;
      int64_t same = 0;
      for (; event != rest && event->owner == owner; event = event->next) {
        charge += event->charge();
        ++same;
      }
      owner->Release(same);
      events += same;
    }
    // Before the lane says that nothing is under way, which ends a Flush.
    delivered_.fetch_add(events, std::memory_order_relaxed);
    Free(charge);
    lane.Finish(pool_, first, rest);
    if (flushing_.load() != 0) {
      std::lock_guard<std::mutex> lock(flush_mutex_);
      flushed_.notify_all();
    }
  }

  /// Puts what is left of a batch back at the head: the worker is slow, and there
  /// it may still be dropped.
  void GiveBack(TapBatch rest) {
    LaneOf(rest.first->device).GiveBack(rest);
    drained_ = false;
  }

  // --- Everybody -----------------------------------------------------------------

  /// A number above that of every event pushed so far.
  int64_t Mark() const { return sequence_.load(); }

  /// Waits until the events before `mark` are done, so many seconds at most.
  bool Flush(int64_t mark, double seconds) {
    const auto until = std::chrono::steady_clock::now() +
                       std::chrono::duration_cast<std::chrono::nanoseconds>(
                           std::chrono::duration<double>(seconds));
    flushing_.fetch_add(1);
    Wake();
    bool done;
    {
      std::unique_lock<std::mutex> lock(flush_mutex_);
      while (!(done = DoneBefore(mark)) &&
             std::chrono::steady_clock::now() < until) {
        // In slices: an event that is dropped tells nobody.
        flushed_.wait_for(lock, std::chrono::milliseconds(10));
      }
    }
    flushing_.fetch_sub(1);
    return done;
  }

  /// Drops what is queued.
  void Discard() {
    const int64_t mark = Mark();
    // First what the worker has in its hands: it asks before each delivery.
    discarded_before_.store(mark);
    for (TapLane& lane : lanes_) {
      int64_t events = 0;
      const int64_t charge = lane.DropBefore(pool_, mark, &events);
      CountEvicted(events);
      if (charge != 0) Free(charge);
    }
    Wake();
  }

  bool IsDiscarded(const TapEvent& event) const {  // the worker then forgets it
    return event.sequence < discarded_before_.load();
  }

  void SetLimit(int64_t bytes) {
    limit_.store(bytes);
    pool_.set_most_cached(static_cast<size_t>(bytes / 2));
    Free(0);
  }

  /// Wait gives 0 when nothing is left, and nobody waits for space any more.
  void Stop() {
    {
      std::lock_guard<std::mutex> lock(wake_mutex_);
      stopped_ = true;
      wake_.notify_all();
    }
    space_.Freed();
  }

  int64_t limit() const { return limit_.load(); }
  int64_t bytes() const { return bytes_.load(); }
  int64_t delivered() const { return delivered_.load(); }
  int64_t dropped() const { return dropped_.load(); }
  int64_t pushed() const { return sequence_.load(); }
  int64_t pending() const { return pushed() - delivered() - evicted_.load(); }
  int64_t blocked() const { return space_.waiters(); }

 private:
  static constexpr std::chrono::microseconds kNap{5'000};
  static constexpr int64_t kWakeBytes = 1 << 20;
  enum Rest { kAwakeNow, kNapping, kAsleep };
  static constexpr std::chrono::microseconds kAwake{60'000};
  /// Before the lane's first event is linked.
  void UseLane(int number) {
    int used = lanes_used_.load(std::memory_order_relaxed);
    while (used <= number && !lanes_used_.compare_exchange_weak(used, number + 1)) {
    }
  }
  TapLane& LaneOf(int device) {
    return lanes_[static_cast<unsigned>(device + 1) % kLanes];
  }

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
      if (!batch) continue;  // dropped meanwhile, or another is older
      drained_ = second == TapLane::kNone && lanes_[oldest].first() == second;
      return batch;
    }
  }

  /// The lane with the oldest head, but for one; -1 where all are empty.
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

  /// Whether the worker should not nap: somebody waits, or will soon.
  bool Hurried() const {
    return flushing_.load() != 0 || stopped_.load() || bytes_.load() > WakeBytes();
  }
  int64_t WakeBytes() const { return std::min(limit_.load() / 2, kWakeBytes); }

  bool Fits(int64_t before, int64_t charge) const {
    return before + charge <= limit_.load() || before == 0;
  }

  bool Admit(TapLane& lane, int64_t charge, WhenFull when_full, bool nested) {
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
          if (charge > limit_.load()) return false;  // others would go in vain
          if (!DropOne(lane) && !Fits(bytes_.load(), charge)) return false;
          break;
        case WhenFull::kBlock:
          WaitForSpace(charge);
          if (stopped_.load()) return false;
      }
    }
  }

  void WaitForSpace(int64_t charge) {
    Wake();
    space_.Wait([&] { return Fits(bytes_.load(), charge) || stopped_.load(); });
  }

  void CountEvicted(int64_t events) {
    evicted_.fetch_add(events, std::memory_order_relaxed);
    dropped_.fetch_add(events, std::memory_order_relaxed);
  }

  bool DropOne(TapLane& lane) {
    const int64_t charge = lane.DropOldest(pool_);
    if (charge == 0) return false;
    CountEvicted(1);
    Free(charge);
    return true;
  }

  void Free(int64_t charge) {
    bytes_.fetch_sub(charge);
    space_.Freed();
  }

  void Wake() {
    std::lock_guard<std::mutex> lock(wake_mutex_);
    rest_.store(kAwakeNow);
    wake_.notify_all();
  }

  bool DoneBefore(int64_t mark) {
    return std::all_of(std::begin(lanes_), std::end(lanes_),
                       [mark](TapLane& lane) { return lane.DoneBefore(mark); });
  }

  TapLane lanes_[kLanes];
  SlabPool pool_;
  alignas(64) std::atomic<int64_t> sequence_{0};
  alignas(64) std::atomic<int64_t> bytes_{0};
  std::atomic<int64_t> limit_{256'000'000};
  std::atomic<int64_t> flushing_{0}, delivered_{0}, dropped_{0};
  std::atomic<int64_t> evicted_{0};  ///< of those dropped, what had been queued
  std::atomic<int> rest_{kAwakeNow};
  std::atomic<bool> stopped_{false};
  std::atomic<int> lanes_used_{0};  ///< all behind are empty
  bool drained_ = false;  ///< the worker's: its last look emptied the queue
  std::atomic<int64_t> discarded_before_{0};
  TapSpace space_;
  std::mutex wake_mutex_, flush_mutex_;
  std::condition_variable wake_, flushed_;
};

}  // namespace hostcall
