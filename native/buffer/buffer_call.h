// A call that works in place: the function gets Buffers over XLA's memory,
// or native code its addresses.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/call_scope.h"
#include "plan/plan.h"

namespace hostcall {

/// One row: function(context, *results, *arguments), each a Buffer. The GIL is
/// held. False with a Python error set; a view that was kept is one.
bool RunOnBuffers(const Plan& plan, const ActiveCall& call, char* const* args,
                  char* const* targets);

/// How native code went: its number, what debug mode found, and the row that
/// failed.
struct NativeStatus {
  int32_t number = 0;
  int changed = -1;    ///< an argument that was written to
  int unwritten = -1;  ///< a result that was not written
  bool ok() const { return number == 0 && changed < 0 && unwritten < 0; }
  std::vector<int64_t> row;
};

/// All rows of a plan with native code. Knows no Python, and needs no GIL. `stream`
/// is a GPU's, or null.
NativeStatus RunNative(const Plan& plan, const void* const* operands,
                       void* const* results, void* stream);

/// Sets the Python error of a status that is not ok. The GIL is held.
void RaiseStatus(const Plan& plan, const NativeStatus& status);

}  // namespace hostcall
