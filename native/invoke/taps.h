// A tap's way: whether an execution goes through, how its operands come into the
// queue, and how the queue's events reach their Python functions.
#pragma once

#include <cassert>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/layout.h"
#include "plan/kind.h"
#include "plan/plan.h"
#include "plan/throttle.h"
#include "queue/tap_queue.h"

namespace hostcall {

/// A tap. Its handler puts the operands into the queue, and the worker runs the
/// function later, on one event or on several.
class TapKind final : public Kind {
 public:
  WhenFull when_full = WhenFull::kBlock;
  bool nested = false;  ///< host code runs its program, so it never waits for space
  std::vector<int> only;    ///< ordinals of the devices that tap; empty: all
  bool linked = false;      ///< has one result, a number that says that the tap ran
  bool through = false;     ///< returns its arguments as results
  int64_t every_steps = 0;  ///< one in this many executions goes through; 0: all
  int64_t every_ns = 0;     ///< at most one in this many nanoseconds; 0: no bound
  double sample = 1;        ///< the share of executions that go through
  /// Whether the last operand is the flag `always`: a bool that lets an execution
  /// through which `every` or `sample` would leave out. It is not queued.
  bool always = false;
  int64_t batch =
      0;  ///< up to this many events in one call; 0: each alone, unstacked
  /// Where the operands lie in an event of the queue, the mask first. Derived.
  Layout layout;

  std::unique_ptr<const Kind> For(const Plan& plan) const override;
  const std::vector<Leaf>& ReturnedLeaves(const Plan& plan) const override {
    return through ? plan.args : plan.results;
  }
  std::vector<size_t> ExtraOperands() const override {
    return std::vector<size_t>(always ? 1 : 0, sizeof(bool));
  }
  std::vector<size_t> ExtraResults() const override {
    return std::vector<size_t>(linked ? 1 : 0, sizeof(int32_t));
  }
  std::unique_ptr<Throttle> NewThrottle() const override {
    return Throttle::For(every_steps, every_ns, sample);
  }
  bool Run(const Execution& execution, ActiveCall& call,
           Progress* progress) const override;
};

/// The kind of a plan that is known to be a tap's.
inline const TapKind& TapOf(const Plan& plan) {
  assert(Is<TapKind>(*plan.kind) && "whoever asks has checked the plan's kind");
  return static_cast<const TapKind&>(*plan.kind);
}

/// Whether this device taps.
bool IsWanted(const TapKind& tap, int device);
/// Whether the tap has a `where` of one value, which is False; counts it then. The
/// operands are on the host.
bool IsMasked(const Plan& plan, const void* const* operands);
/// Whether `every` or `sample` leaves this execution out; counts it then. A null
/// throttle leaves none out, and the flag `always`, which is the last operand,
/// overrules it. The operands are on the host.
bool IsSkipped(const Plan& plan, Throttle* throttle, int device, int64_t run,
               const void* const* operands);

/// Queues a tap of these operands, which are copied before this returns. Returns
/// false if the tap was dropped. May wait for the worker, which needs the GIL, so
/// the caller does not hold it. With `at_once` it never waits: a tap that would
/// have to is let in above the queue's limit. Calls no Python, unless the queue is
/// stopped: then there is no worker (any more), and the calling thread delivers
/// what is queued. Throws std::bad_alloc or PushInterrupted.
bool PushTap(const Plan& plan, int device, int64_t run, const void* const* operands,
             bool at_once = false);

/// Waits until a tap of this plan would find space in the queue; for a push that
/// follows `at_once`. A wait is counted and recorded. The caller does not hold the
/// GIL. Throws PushInterrupted.
void AwaitSpace(const Plan& plan, int device, int64_t run);

/// Delivers taps until the queue is stopped and empty. Called on the worker's
/// thread with the GIL held. Releases the GIL while it waits, and for a moment each
/// time that deliveries have taken long.
void RunTapWorker();

}  // namespace hostcall
