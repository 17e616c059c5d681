#include "plan/push_tap.h"

#include <cstring>

#include "queue/tap_queue.h"
#include "queue/tap_thread.h"

namespace hostcall {

bool PushTap(const Plan& plan, int device, int64_t run, const void* const* operands,
             bool at_once) {
  const TapLayout& layout = plan.layout;
  const bool never_waits = at_once || plan.tap->nested || TapThread::IsThis();
  // Not const for the queue, which counts its references to the plan.
  return TapQueue::Get().Push(
      device, run, const_cast<Plan&>(plan), layout.bytes, plan.tap->when_full,
      never_waits, [&](char* to) {
        size_t i = 0;
        if (plan.masked) {
          std::memcpy(to, operands[i++], static_cast<size_t>(plan.mask_rows));
        }
        for (const Leaf& leaf : plan.args) {
          std::memcpy(to + layout.offsets[i], operands[i], leaf.buffer_bytes());
          ++i;
        }
      });
}

}  // namespace hostcall
