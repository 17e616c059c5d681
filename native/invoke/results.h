// What the function returned, into XLA's buffers.
#pragma once

#include "plan/plan.h"

namespace hostcall {

/// Takes a return value apart and stores its leaves at `targets`. The value is
/// copied before the caller lets go of it. False with a Python error set.
bool StoreResults(const Plan& plan, PyObject* value, char* const* targets);

}  // namespace hostcall
