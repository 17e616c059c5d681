// What Python sees of taps.
#pragma once

#include <nanobind/nanobind.h>

#include "plan/plan.h"

namespace hostcall {

/// Reads (when_full, nested, only, through, every_steps, every_ns, sample, linked).
TapSettings ReadTapSettings(nanobind::object settings);

void InitTaps(nanobind::module_& m);

}  // namespace hostcall
