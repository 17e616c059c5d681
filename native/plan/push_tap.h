// Copies a tap's operands into the queue.
#pragma once

#include <cstdint>

#include "plan/plan.h"

namespace hostcall {

/// Queues a tap of these operands, which are copied before this returns. Returns
/// false if the tap was dropped. Calls no Python. May wait for the worker, which
/// needs the GIL, so the caller does not hold it. With `at_once` it never waits: a
/// tap that would have to is let in above the queue's limit. Throws std::bad_alloc
/// or PushInterrupted.
bool PushTap(const Plan& plan, int device, int64_t run, const void* const* operands,
             bool at_once = false);

/// Waits until a tap of this plan would find space in the queue; for a push that
/// follows `at_once`. A wait is counted and recorded. The caller does not hold the
/// GIL. Throws PushInterrupted.
void AwaitSpace(const Plan& plan, int device, int64_t run);

}  // namespace hostcall
