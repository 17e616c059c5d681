// Calls, as XLA's CPU runtime makes them. Each handler runs once for each execution
// of its place in a program.
#pragma once

#include "base/guards.h"
#include "xla/ffi/api/c_api.h"

namespace hostcall {

XLA_FFI_Error* ExecuteCall(XLA_FFI_CallFrame* frame);
/// Behind the reduction that brings all processes a call's results: fails if the
/// call did. The operands are the outcome and the results. The results of the
/// verdict share the memory of the latter.
XLA_FFI_Error* ExecuteVerdict(XLA_FFI_CallFrame* frame);
/// The floor that benchmarks compare with: enters Python, and nothing else.
XLA_FFI_Error* ExecuteRaw(XLA_FFI_CallFrame* frame);
void SetRawFunction(PyObject* function);

}  // namespace hostcall
