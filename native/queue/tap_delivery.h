// How events leave the tap queue: the worker's side of tap_queue.h, which includes
// this file.
//
// Waking. A wake-up costs the device a system call. And every time that the worker
// takes the GIL from a Python thread that dispatches programs, it costs that thread
// some 300 us (measured: 24 us a dispatch with naps of 1 ms, 9 us with 5 ms). So a
// worker that has emptied the queue naps before it looks again, and then finds more
// at once. A flush, a push that waits for space, and a queue longer than kWakeBytes
// end the nap. After kAwake of naps in vain the worker sleeps until it is woken:
//
//   1. device: links its event (under the lane's lock), then reads rest_
//   2. worker: sets rest_ to kAsleep, then looks into the lanes
//
// All of these are sequentially consistent, so at least one sees the other: the
// device wakes the worker, or the worker finds the event. The end of a nap is
// decided in the same way, with bytes_ and flushing_ in place of the lanes
// (Hurried).
#pragma once

#include "queue/tap_queue.h"

namespace hostcall {

inline TapBatch TapQueue::Wait(size_t most) {
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
    if (idle < kAwake) {
      // Hurried is asked after rest_ is set, see above. A Wake that comes in
      // between waits for the mutex, and sets rest_ once wait_for has released it.
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
    // wait for a device in Push. A Wake in the gap sets rest_, which wait() checks
    // first.
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

/// Takes a batch from the lane with the oldest event; empty if all lanes are.
inline TapBatch TapQueue::Take(size_t most) {
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
    // The lane's head was dropped before it was locked, or another lane's is older.
    if (!batch) continue;
    drained_ = second == TapLane::kNone && lanes_[oldest].first() == second;
    return batch;
  }
}

/// The lane with the oldest head, leaving out lane `but`; -1 if all are empty.
/// Reads without locks: Take confirms the answer under the lane's lock.
inline int TapQueue::Oldest(int but) const {
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

inline void TapQueue::Finish(TapEvent* first, TapEvent* rest) {
  TapLane& lane = LaneOf(first->device);
  int64_t charge = 0, events = 0;
  for (TapEvent* event = first; event != rest;) {
    // Neighbours mostly have the same owner. Its count is a cache line that devices
    // write too, so it is changed once for all of them.
    TapOwner* owner = event->owner;
    int64_t same = 0;
    for (; event != rest && event->owner == owner; event = event->next) {
      charge += event->charge();
      ++same;
    }
    owner->Release(same);
    events += same;
  }
  // In this order: a Flush ends when the lane says that nothing is under way, and
  // who flushed may then read `delivered` and `bytes`.
  delivered_.fetch_add(events, std::memory_order_relaxed);
  Free(charge);
  lane.Finish(pool_, first, rest);
  // A Flush that begins after this load looks at the lanes itself. Locking lets one
  // that has just looked get to sleep before it is notified.
  if (flushing_.load() != 0) {
    std::lock_guard<std::mutex> lock(flush_mutex_);
    flushed_.notify_all();
  }
}

inline void TapQueue::GiveBack(TapBatch rest) {
  LaneOf(rest.first->device).GiveBack(rest);
  drained_ = false;
}

inline bool TapQueue::Flush(int64_t mark, double seconds) {
  const auto until = std::chrono::steady_clock::now() +
                     std::chrono::duration_cast<std::chrono::nanoseconds>(
                         std::chrono::duration<double>(seconds));
  flushing_.fetch_add(
      1);  // from here on the worker neither naps nor forgets to notify
  Wake();
  bool done;
  {
    std::unique_lock<std::mutex> lock(flush_mutex_);
    while (!(done = DoneBefore(mark)) && std::chrono::steady_clock::now() < until) {
      // In slices, since dropping an event notifies nobody.
      flushed_.wait_for(lock, std::chrono::milliseconds(10));
    }
  }
  flushing_.fetch_sub(1);
  return done;
}

inline void TapQueue::Discard() {
  const int64_t mark = Mark();
  // Before the lanes are emptied, for the events that the worker has already taken:
  // it asks IsDiscarded before each delivery.
  discarded_before_.store(mark);
  for (TapLane& lane : lanes_) {
    int64_t events = 0;
    const int64_t charge = lane.DropBefore(pool_, mark, &events);
    CountEvicted(events);
    if (charge != 0) Free(charge);
  }
  Wake();
}

/// Whether the worker should not nap: somebody waits for it, or will soon.
inline bool TapQueue::Hurried() const {
  return flushing_.load() != 0 || stopped_.load() || bytes_.load() > WakeBytes();
}

/// Ends the worker's rest.
inline void TapQueue::Wake() {
  // Under the lock, or the notification could fall between the worker's check of
  // rest_ and its wait, and be lost.
  std::lock_guard<std::mutex> lock(wake_mutex_);
  rest_.store(kAwakeNow);
  wake_.notify_all();
}

}  // namespace hostcall
