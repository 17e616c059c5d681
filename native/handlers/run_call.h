// A call from a handler: into Python or native code, alone or with the program's
// other devices.
#pragma once

#include <cstdint>
#include <string>

#include "handlers/plan_state.h"

namespace hostcall {

/// Makes the call of a place. Null, or the error for XLA. A `stream` says that the
/// operands and results lie in a GPU's memory.
XLA_FFI_Error* MakeCall(XLA_FFI_CallFrame* frame, const PlanState& state,
                        void* const* operands, void* const* results,
                        void* stream = nullptr);

/// What a program fails with behind a call that told its outcome. Null if the call
/// did not fail.
XLA_FFI_Error* ErrorOfOutcome(XLA_FFI_CallFrame* frame, const Plan& plan,
                              const void* outcome);

/// Fails this device's call and wakes the devices that wait for it. The state has a
/// team.
XLA_FFI_Error* FailWithTeam(XLA_FFI_CallFrame* frame, const PlanState& state,
                            const std::string& text);

}  // namespace hostcall
