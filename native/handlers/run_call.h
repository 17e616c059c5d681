// Makes a handler's call of Python or native code, alone or together with the
// program's other devices.
#pragma once

#include <string>

#include "handlers/plan_state.h"

namespace hostcall {

/// The kinds whose executions MakeCall makes: all but taps, which are only queued.
bool IsCall(const Kind& kind);

/// Makes the call of a place. Returns the error for XLA, or null. `operands` and
/// `results` are the work's, or copies on the host. If `stream` is not null, they
/// are in a GPU's memory, and it is XLA's stream. The caller does not hold the GIL.
XLA_FFI_Error* MakeCall(const Work& work, void* const* operands,
                        void* const* results, void* stream = nullptr);

/// The outcome among the operands of a verdict, which has the call's results behind
/// it. Throws if it is not where it should be, or has another size.
const XLA_FFI_Buffer* OutcomeIn(const XLA_FFI_CallFrame* frame, const Plan& plan);

/// The error with which a program fails behind a call that told its outcome; null
/// if the call did not fail. `outcome` is on the host.
XLA_FFI_Error* ErrorOfOutcome(XLA_FFI_CallFrame* frame, const Plan& plan,
                              const void* outcome);

/// Fails this device's call with `text`, and lets the other devices of its team go
/// on. Returns the error for XLA. The state has a team.
XLA_FFI_Error* FailWithTeam(const Work& work, const std::string& text);

}  // namespace hostcall
