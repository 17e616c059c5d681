// Calls: a Python function gets arrays, and its results are stored in XLA's
// buffers.
#pragma once

#include <memory>

#include "plan/kind.h"

namespace hostcall {

/// Makes what calls need. Called once, when the module is imported. False with a
/// Python error set.
bool InitCallKind();

/// How arguments reach the function.
enum class Lend {
  kCopy,  ///< arrays that the function owns
  kArgs,  ///< read-only views of XLA's memory
  kOut,   ///< as kArgs, and writable views of the results' memory as `out=`
};

class CallKind final : public Kind {
 public:
  Lend lend = Lend::kCopy;

  std::unique_ptr<const Kind> For(const Plan& plan) const override;
  bool Run(const Execution& execution, ActiveCall& call,
           Progress* progress) const override;
};

/// Calls the function on one row with arrays that it owns. False with a Python
/// error set.
bool RunCopied(const Plan& plan, char* const* args, char* const* targets);

}  // namespace hostcall
