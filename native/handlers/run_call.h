// A call from a handler: into Python, or native code, alone or with the
// other devices of the program.
#pragma once

#include <cstdint>
#include <string>

#include "handlers/cpu_handlers.h"

namespace hostcall {

/// Makes the call of a place. Null, or the error for XLA. `stream` is a GPU's, in
/// whose memory the operands and results are.
XLA_FFI_Error* MakeCall(XLA_FFI_CallFrame* frame, const PlanState& state,
                        void* const* operands, void* const* results,
                        void* stream = nullptr);

/// What a program fails with behind a call that told its outcome; null for nothing.
XLA_FFI_Error* ErrorOfOutcome(XLA_FFI_CallFrame* frame, const Plan& plan,
                              const void* outcome);

/// Of a device that can't make its call: those that wait for it are told.
XLA_FFI_Error* FailWithTeam(XLA_FFI_CallFrame* frame, const PlanState& state,
                            const std::string& text);

}  // namespace hostcall
