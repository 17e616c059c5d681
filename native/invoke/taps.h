// A tap's way: whether an execution goes through, how its operands come into the
// queue, and how the queue's events reach their Python functions.
#pragma once

#include <cstdint>

#include "plan/plan.h"
#include "plan/throttle.h"

namespace hostcall {

/// Whether this device taps.
bool IsWanted(const Plan& plan, int device);
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
