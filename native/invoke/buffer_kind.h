// Buffer callbacks, which work in place: a Python function gets Buffers over XLA's
// memory, or native code gets its addresses.
#pragma once

#include <cstdint>
#include <memory>

#include "plan/kind.h"
#include "plan/plan.h"

namespace hostcall {

class BufferKind final : public Kind {
 public:
  bool debug = false;     ///< poisons outputs, and checks whether inputs changed
  uintptr_t address = 0;  ///< native code to run instead of the function; 0: none
  bool status = false;    ///< whether the native code returns an error number

  std::unique_ptr<const Kind> For(const Plan& plan) const override;
  /// The context, and a Buffer for each result and argument.
  size_t SpareCount(const Plan& plan) const override;
  /// Runs the native code on all rows, up to the first that fails.
  bool RunNative(const Execution& execution,
                 std::unique_ptr<Progress>* progress) const override;
  /// Calls function(context, *results, *arguments) for each row, where results and
  /// arguments are Buffers. A view that was kept after the call is an error too.
  bool Run(const Execution& execution, ActiveCall& call,
           Progress* progress) const override;
};

}  // namespace hostcall
