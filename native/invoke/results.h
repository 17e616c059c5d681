// Stores the function's return value in XLA's buffers.
#pragma once

#include "plan/plan.h"

namespace hostcall {

/// Takes a return value apart, and copies its leaves to `targets`. The GIL is held,
/// and released for large copies. False with a Python error set.
bool StoreResults(const Plan& plan, PyObject* value, char* const* targets);

}  // namespace hostcall
