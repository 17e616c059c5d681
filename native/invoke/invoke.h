// The only way into the user's Python function.
#pragma once

#include <string>

#include "plan/call_scope.h"
#include "plan/plan.h"

namespace hostcall {

/// Runs all rows of a call that FilledForMask has not ended. `operands` and
/// `results` point to row-major buffers. The GIL is held. False with a Python error
/// set.
bool Invoke(const Plan& plan, ActiveCall& call, const void* const* operands,
            void* const* results);

/// Where the mask keeps all rows from the function, fills the results. Needs
/// neither Python nor the GIL. False: some row is wanted, or elements are packed.
bool FilledForMask(const Plan& plan, const void* const* operands,
                   void* const* results);

/// Takes the Python error that is set, hands it to the plan's on_error, and
/// returns the text for XLA.
std::string TakeError(const Plan& plan, const ActiveCall& call);

/// Says in the log that one device of several fails with `error`, and only it.
void WarnOfLoneFailure(const Plan& plan, int ordinal, const std::string& error);

}  // namespace hostcall
