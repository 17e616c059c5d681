// A call that works in place: a Python function gets Buffers over XLA's memory, or
// native code gets its addresses.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/call_scope.h"
#include "plan/plan.h"

namespace hostcall {

/// Calls function(context, *results, *arguments) for one row, where results and
/// arguments are Buffers. The GIL is held. False with a Python error set; a view
/// that was kept after the call is an error too.
bool RunOnBuffers(const Plan& plan, const ActiveCall& call, char* const* args,
                  char* const* targets);

/// How native code went.
struct NativeStatus {
  int32_t number = 0;  ///< what the native code returned; 0 is success
  int changed = -1;    ///< debug mode: an argument that was written to, or -1
  int unwritten = -1;  ///< debug mode: a result that was not written, or -1
  bool ok() const { return number == 0 && changed < 0 && unwritten < 0; }
  std::vector<int64_t> row;  ///< the position of the row that failed; else empty
};

/// Runs all rows of a plan with native code, up to the first that fails. Needs no
/// GIL and touches no Python object. `stream` is XLA's stream on a GPU, else null.
NativeStatus RunNative(const Plan& plan, const void* const* operands,
                       void* const* results, void* stream);

/// Sets the Python error for a status that is not ok. The GIL is held.
void RaiseStatus(const Plan& plan, const NativeStatus& status);

}  // namespace hostcall
