#include "invoke/tap_worker.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <thread>

#include "invoke/invoke.h"
#include "plan/call_scope.h"

namespace hostcall {
namespace {

thread_local bool t_worker = false;

/// The worker gives the GIL up after so long, and tells the queue how far it is. A
/// thread that dispatches a program gives the GIL up some twenty times, and would
/// wait for Python's 5 ms each time to have it back (20,000 lines of hc.print took
/// 130 ms to dispatch).
constexpr int64_t kHoldNs = 250'000;
/// A function that takes as long as this leaves what it has not come to in the
/// queue, where `when_full` can drop it.
constexpr int64_t kSlowNs = 50'000;

/// Gives the time of its end.
int64_t Deliver(TapEvent& event) {
  const auto& plan = static_cast<const Plan&>(*event.owner);
  const int64_t start = Ticks();
  {
    CallScope scope(plan, event.device, -1);
    scope.call().start = start;
    scope.call().tap = &event;
    bool ok;
    try {
      constexpr size_t kInline = 8;
      const void* inline_operands[kInline];
      std::vector<const void*> more;
      const void** operands = inline_operands;
      const size_t n = plan.tap.offsets.size();
      if (n > kInline) {
        more.resize(n);
        operands = more.data();
      }
      for (size_t i = 0; i < n; ++i) {
        operands[i] = event.payload() + plan.tap.offsets[i];
      }
      ok = Invoke(plan, scope.call(), operands, nullptr);
    } catch (const std::exception&) {  // no memory
      PyErr_NoMemory();
      ok = false;
    }
    if (!ok) TakeError(plan, scope.call());  // its hook keeps what it is told
  }
  plan.counters->python_ticks += Ticks() - start;
  return NowNs();
}

}  // namespace

bool OnTapWorker() { return t_worker; }

bool PushTap(const Plan& plan, int device, int64_t run, const void* const* operands,
             bool at_once) {
  const TapSettings& tap = plan.tap;
  return TapQueue::Get().Push(
      device, run, const_cast<Plan&>(plan), tap.bytes, tap.when_full,
      at_once || tap.nested || t_worker, [&](char* to) {
        size_t i = 0;
        if (plan.masked) {
          std::memcpy(to, operands[i++], static_cast<size_t>(plan.mask_rows));
        }
        for (const Leaf& leaf : plan.args) {
          std::memcpy(to + tap.offsets[i], operands[i], leaf.buffer_bytes());
          ++i;
        }
      });
}

void RunTapWorker() {
  t_worker = true;
  TapQueue& queue = TapQueue::Get();
  size_t want = 1;
  for (;;) {
    TapBatch batch;
    {
      GilRelease unlocked(true);
      batch = queue.Wait(want);
    }
    if (!batch) break;
    bool slow = false;
    while (batch && !slow) {
      const int64_t start = NowNs();
      int64_t elapsed = 0;
      int n = 0;
      TapEvent* event = batch.first;
      while (event != nullptr && elapsed < kHoldNs) {
        if (queue.IsDiscarded(*event)) {
          queue.CountDiscarded(*event);
        } else {
          elapsed = Deliver(*event) - start;
        }
        event = event->next;
        ++n;
      }
      queue.Finish(batch.first, event);
      batch.first = event;
      slow = elapsed / n > kSlowNs;
      if (batch && !slow) {
        GilRelease others(true);
        // As long as a thread needs to wake up, or it would find the GIL taken
        // again.
        std::this_thread::sleep_for(std::chrono::microseconds(1));
      }
    }
    if (batch) queue.GiveBack(batch);
    want = slow ? 1 : std::min(want * 2, TapQueue::kMostAtOnce);
    Graveyard::Get().Bury();
  }
  t_worker = false;
}

}  // namespace hostcall
