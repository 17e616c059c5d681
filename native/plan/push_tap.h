// A tap's operands, from a device into the queue.
#pragma once

#include <cstdint>

#include "plan/plan.h"

namespace hostcall {

/// Queues a tap of these operands. Calls no Python, and needs no GIL. False: it was
/// dropped. With `at_once` it never waits: if the tap would have to, it goes in
/// above the limit.
bool PushTap(const Plan& plan, int device, int64_t run, const void* const* operands,
             bool at_once = false);

}  // namespace hostcall
