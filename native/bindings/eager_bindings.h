// Python's methods that run a plan without a compiled program.
#pragma once

#include <nanobind/nanobind.h>

#include "base/slot_table.h"
#include "plan/plan.h"

namespace hostcall {

/// Python's reference to a plan.
struct PlanHandle {
  Counted<Plan> plan;
  /// Python destroys it, with the GIL: an eager call is the only use of its plan.
  ~PlanHandle() { plan.DropHere(); }
};

/// Adds the methods `invoke` and `push` to Python's class of plans.
void BindEager(nanobind::class_<PlanHandle>& plan);

}  // namespace hostcall
