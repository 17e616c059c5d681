// The handlers of calls for XLA's CPU runtime, which runs a handler once for each
// execution of its place in a program.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace hostcall {

/// Makes a call of a function on the host.
XLA_FFI_Error* ExecuteCall(XLA_FFI_CallFrame* frame);
/// Fails the program if a call failed in any process (plan/outcome.h). It runs
/// behind the reduction that brings the call's results to all processes. Its
/// operands are the call's outcome and results, and its own results share the
/// memory of the call's.
XLA_FFI_Error* ExecuteVerdict(XLA_FFI_CallFrame* frame);

}  // namespace hostcall
