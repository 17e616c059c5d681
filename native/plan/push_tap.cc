#include "plan/push_tap.h"

#include <cstring>

#include "base/clock.h"
#include "base/flight.h"
#include "queue/tap_queue.h"

namespace hostcall {

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
