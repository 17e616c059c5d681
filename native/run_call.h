// Layer F. A call from a handler: into Python, or native code, alone or with the
// other devices of the program.
#pragma once

#include <cstdint>
#include <string>

#include "cpu_handlers.h"

namespace hostcall {

/// Where a call comes from.
struct CallSite {
  int ordinal;
  int64_t run = -1;
  void* stream = nullptr;  ///< of a GPU
  bool on_gpu = false;     ///< operands and results are in its memory
  /// The running handler's, which returns after the call.
  const XLA_FFI_CallFrame* frame = nullptr;
};

/// Makes the call of a place. Null, or the error for XLA.
XLA_FFI_Error* MakeCall(XLA_FFI_CallFrame* frame, const PlanState& state,
                        CallSite site, void* const* operands, void* const* results);

/// Of a device that can't make its call: those that wait for it are told.
XLA_FFI_Error* FailWithTeam(XLA_FFI_CallFrame* frame, const PlanState& state,
                            CallSite site, const std::string& text);

}  // namespace hostcall
