// Which executions of a tap go through, on any platform: asked before a byte moves.
#pragma once

#include <cstdint>

#include "handlers/plan_state.h"

namespace hostcall {

/// Whether this device is one of those that tap.
bool IsWanted(const Plan& plan, int device);
/// Whether a `where` of one value is False. Counted.
bool IsMasked(const Plan& plan, const void* const* operands);
/// Whether `every` or `sample` leaves this execution out. Counted. A null throttle
/// leaves out none.
bool IsSkipped(const Plan& plan, Throttle* throttle, int device, int64_t run);

}  // namespace hostcall
