// How a push gets into the tap queue: the devices' side of tap_queue.h, which
// includes this file.
//
// Admission is a compare-and-swap on the number of bytes, before the event is
// written: the limit holds at every moment, and only what is let in is counted. The
// race between a full queue and its relief:
//
//   1. device: reads bytes_, finds too many; locks space_, adds itself to its
//              waiters, then reads bytes_ again
//   2. worker: subtracts from bytes_, then reads the waiters
//
// All four are sequentially consistent: either the device reads the smaller number,
// or the worker sees a waiter, takes the lock (so the device is asleep) and wakes
// it.
#pragma once

#include "queue/tap_queue.h"

namespace hostcall {

template <typename Fill>
bool TapQueue::Push(int device, int64_t run, TapOwner& owner, size_t bytes,
                    WhenFull when_full, bool nested, Fill fill, Pushed* pushed) {
  Pushed unread;
  if (pushed == nullptr) pushed = &unread;
  TapLane& lane = LaneOf(device);
  UseLane(static_cast<int>(&lane - lanes_));
  const size_t lines = TapEvent::LinesFor(bytes);
  if (lines > std::numeric_limits<uint32_t>::max()) throw std::bad_alloc();
  const auto charge = static_cast<int64_t>(lines * TapEvent::kLine);
  if (!Admit(lane, charge, when_full, nested, &pushed->waited)) {
    owner.counts->dropped.fetch_add(1, std::memory_order_relaxed);
    CountDropped();
    return false;
  }
  try {
    const bool droppable = when_full == WhenFull::kDropOldest;
    pushed->sequence =
        lane.Store(pool_, sequence_, {device, run, owner, lines, droppable}, fill);
  } catch (...) {  // no memory for a slab
    Free(charge);
    throw;
  }
  // Read after the event is linked: the device's half of the race with a worker
  // that goes to sleep (tap_delivery.h). A napping worker is left alone, since it
  // wakes up by itself, unless the queue grows long.
  const int rest = rest_.load();
  if (rest == kAsleep || (rest == kNapping && bytes_.load() > WakeBytes())) Wake();
  return true;
}

/// Makes the worker look at this lane from now on. Called before the lane's first
/// event is linked, so that no event lies in a lane that the worker skips.
///
/// Sequentially consistent, also for a device that finds its lane in use already:
///
///   1. device A: adds the lane to lanes_used_
///   2. device B: reads that, links an event, then reads rest_
///   3. worker:   sets rest_ to asleep, then reads lanes_used_ and looks at the
///   lanes
///
/// If the worker read the old number, its read comes before 1 in the one order of
/// such operations. B's read comes after 1, and B's read of rest_ after that, so B
/// finds the worker asleep and wakes it. A weaker read of B's has no place in that
/// order: both could read the old values, and the event would lie there until the
/// next push. It costs nothing on x86, and a load-acquire on Arm.
inline void TapQueue::UseLane(int number) {
  int used = lanes_used_.load();
  while (used <= number && !lanes_used_.compare_exchange_weak(used, number + 1)) {
  }
}

/// Reserves `charge` bytes, by the policy if the queue is full. False: the event is
/// to be dropped. Adds the ticks of waiting to `*waited`.
inline bool TapQueue::Admit(TapLane& lane, int64_t charge, WhenFull when_full,
                            bool nested, int64_t* waited) {
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

/// Returns when `charge` would fit, or the queue is stopped. Another push may take
/// the space first, so the caller tries again.
inline void TapQueue::WaitForSpace(int64_t charge) {
  Wake();  // a napping worker would let the device wait for the rest of its nap
  space_.Wait([&] { return Fits(bytes_.load(), charge) || stopped_.load(); });
}

/// Drops the oldest droppable event of the lane. False if it finds none.
inline bool TapQueue::DropOne(TapLane& lane) {
  const int64_t charge = lane.DropOldest(pool_);
  if (charge == 0) return false;
  CountEvicted(1);
  Free(charge);
  return true;
}

}  // namespace hostcall
