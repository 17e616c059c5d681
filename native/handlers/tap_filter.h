// Decides which executions of a tap go through, on the CPU and on GPUs. Needs no
// GIL.
#pragma once

#include <cstdint>

#include "handlers/plan_state.h"

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

}  // namespace hostcall
