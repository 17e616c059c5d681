// The engine calls users' Python functions only through here.
#pragma once

#include <string>

#include "plan/call_scope.h"
#include "plan/plan.h"

namespace hostcall {

/// Makes an execution with Python, or what `progress`, which may be null, says is
/// left of it. Operands and results are row-major buffers, on the host unless the
/// kind works on a GPU's memory. The GIL is held, and may be released meanwhile.
/// False with a Python error set.
bool Invoke(const Execution& execution, ActiveCall& call, Progress* progress);

/// Fills the results, and returns true, if the mask keeps all rows from the
/// function. Returns false if Invoke is needed: some row is wanted, or elements are
/// packed. Needs neither Python nor the GIL.
bool FilledForMask(const Plan& plan, const void* const* operands,
                   void* const* results);

/// Takes a return value apart, and copies its leaves to `targets`. The GIL is held,
/// and released for large copies. False with a Python error set.
bool StoreResults(const Plan& plan, PyObject* value, char* const* targets);

/// FilledForMask, which also counts the execution, if the plan counts them: then
/// `*executions_before` gets how many came before in this run, and the GIL is not
/// held.
bool Masked(const Execution& execution, int64_t* executions_before);

/// Takes the Python error that is set, hands it to the plan's on_error, and returns
/// the text for XLA. The GIL is held. No Python error is set afterwards.
std::string TakeError(const Plan& plan, const ActiveCall& call);

/// Reports that one device of several fails with `error` while the others go on.
/// The GIL is held.
void WarnOfLoneFailure(const Plan& plan, int ordinal, const std::string& error);

}  // namespace hostcall
