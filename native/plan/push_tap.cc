#include "plan/push_tap.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/clock.h"
#include "base/flight.h"
#include "queue/tap_queue.h"

namespace hostcall {

bool IsWanted(const Plan& plan, int device) {
  const std::vector<int>& only = plan.tap->only;
  return only.empty() || std::find(only.begin(), only.end(), device) != only.end();
}

bool IsMasked(const Plan& plan, const void* const* operands) {
  // A mask with several rows is queued with the values, and the worker applies it.
  if (!plan.masked || plan.mask_rows != 1) return false;
  if (*static_cast<const bool*>(operands[0])) return false;
  plan.counts->masked.fetch_add(1, std::memory_order_relaxed);
  return true;
}

bool IsSkipped(const Plan& plan, Throttle* throttle, int device, int64_t run,
               const void* const* operands) {
  // The throttle is asked first, so that it counts the execution in any case.
  if (throttle == nullptr || throttle->Lets(device, run)) return false;
  if (plan.tap->always && *static_cast<const bool*>(operands[plan.operands()])) {
    return false;
  }
  plan.counts->skipped.fetch_add(1, std::memory_order_relaxed);
  return true;
}

bool PushTap(const Plan& plan, int device, int64_t run, const void* const* operands,
             bool at_once) {
  const TapLayout& layout = plan.layout;
  // A tap from inside a delivery would wait for space that only its own thread can
  // make; a nested one, for a worker that may wait for the program that taps.
  const bool never_waits = at_once || plan.tap->nested || t_delivers_taps;
  const int64_t start = Ticks();
  Flight flight(plan.NewEvent(EventKind::kTap, device, run, start));
  // The const_cast is for the reference count: the queue retains the plan until the
  // worker has delivered the event.
  const Pushed pushed = TapQueue::Get().Push(
      device, run, const_cast<Plan&>(plan), layout.bytes, plan.tap->when_full,
      never_waits, [&](char* to) {
        // Only copies, since this may run under a lock of the queue.
        size_t i = 0;
        if (plan.masked) {
          std::memcpy(to, operands[i++], static_cast<size_t>(plan.mask_rows));
        }
        for (const Leaf& leaf : plan.args) {
          std::memcpy(to + layout.offsets[i], operands[i], leaf.buffer_bytes());
          ++i;
        }
      });
  flight.Number(pushed.sequence);
  // A tap that did not wait takes less time than a reading of the clock, which only
  // a trace needs.
  const int64_t end = pushed.waited != 0 || EventBuffer::IsOn() ? Ticks() : start;
  flight.Ended(end, pushed.queued());
  if (pushed.waited != 0) {
    plan.counts->waited.fetch_add(pushed.waited, std::memory_order_relaxed);
  }
  return pushed.queued();
}

void AwaitSpace(const Plan& plan, int device, int64_t run) {
  TapQueue& queue = TapQueue::Get();
  if (queue.HasSpace(plan.layout.bytes)) return;
  const int64_t start = Ticks();
  Flight flight(plan.NewEvent(EventKind::kTap, device, run, start));
  queue.AwaitSpace(plan.layout.bytes);
  const int64_t end = Ticks();
  flight.Ended(end, true);
  plan.counts->waited.fetch_add(end - start, std::memory_order_relaxed);
}

}  // namespace hostcall
