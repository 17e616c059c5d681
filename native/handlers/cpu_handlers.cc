// The handlers use XLA's C interface, not its C++ templates, which would do work at
// each call that these handlers do not need.
//
// Threads. XLA enters handlers on any thread, normally without the GIL. If the
// caller of XLA holds it, Guarded releases it first. XLA is built without
// exceptions, so no exception may leave a handler.

#include "handlers/cpu_handlers.h"

#include "handlers/ffi.h"
#include "handlers/plan_state.h"
#include "handlers/run_call.h"

namespace hostcall {
namespace {

XLA_FFI_Error* Execute(XLA_FFI_CallFrame* frame) {
  const PlanState* found = nullptr;
  if (XLA_FFI_Error* error = StateOf(frame, &found)) return error;
  const PlanState& state = *found;
  const Plan& plan = *state.plan;

  Pointers operands(frame->args, frame->args.args, plan.operands());
  Pointers results(frame->rets, frame->rets.rets, plan.outputs());
  if (plan.tap || !operands.ok() || !results.ok()) return BufferMismatch(frame);
  return MakeCall(frame, state, operands.data(), results.data());
}

XLA_FFI_Error* Judge(XLA_FFI_CallFrame* frame) {
  const PlanState* state = nullptr;
  if (XLA_FFI_Error* error = FindState(frame, &state)) return error;
  const XLA_FFI_Buffer* told = OutcomeIn(frame, *state->plan);
  if (told == nullptr) return BufferMismatch(frame);
  return ErrorOfOutcome(frame, *state->plan, told->data);
}

}  // namespace

XLA_FFI_Error* ExecuteCall(XLA_FFI_CallFrame* frame) {
  return Guarded(frame, Execute);
}

XLA_FFI_Error* ExecuteVerdict(XLA_FFI_CallFrame* frame) {
  return Guarded(frame, Judge);
}

}  // namespace hostcall
