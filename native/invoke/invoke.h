// The engine calls users' Python functions only through here.
#pragma once

#include <string>

#include "plan/call_scope.h"
#include "plan/plan.h"

namespace hostcall {

/// Makes what calls need. Called once, when the module is imported. False with a
/// Python error set.
bool InitInvoke();

/// Runs all rows of a call. `operands` and `results` are addresses of row-major
/// buffers, on the host unless the plan works on Buffers. The GIL is held, and may
/// be released meanwhile. Returns false with a Python error set.
bool Invoke(const Plan& plan, ActiveCall& call, const void* const* operands,
            void* const* results);

/// Runs the function of a tap on `count` events together. The events follow each
/// other from `first` on, and belong to this plan, whose taps have no rows and no
/// masks of several bools. Otherwise as Invoke.
bool InvokeRun(const Plan& plan, TapEvent& first, size_t count);

/// Fills the results, and returns true, if the mask keeps all rows from the
/// function. Returns false if Invoke is needed: some row is wanted, or elements are
/// packed. Needs neither Python nor the GIL.
bool FilledForMask(const Plan& plan, const void* const* operands,
                   void* const* results);

/// Takes a return value apart, and copies its leaves to `targets`. The GIL is held,
/// and released for large copies. False with a Python error set.
bool StoreResults(const Plan& plan, PyObject* value, char* const* targets);

/// FilledForMask, which also counts the execution, if the plan counts them: then
/// `execution` gets how many came before in this run, and the GIL is not held.
bool Masked(const Plan& plan, int device, int64_t run, const void* const* operands,
            void* const* results, int64_t* execution);

/// Takes the Python error that is set, hands it to the plan's on_error, and returns
/// the text for XLA. The GIL is held. No Python error is set afterwards.
std::string TakeError(const Plan& plan, const ActiveCall& call);

/// Reports that one device of several fails with `error` while the others go on.
/// The GIL is held.
void WarnOfLoneFailure(const Plan& plan, int ordinal, const std::string& error);

}  // namespace hostcall
