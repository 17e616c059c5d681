// Written on XLA's C interface rather than its C++ templates: a handler has few
// parts, and pays for no others.
//
// Threads. XLA enters handlers on any thread, without the GIL; but whoever calls
// XLA may hold it, so Guarded releases it first. XLA is built without exceptions,
// so none may leave a handler.

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
  if (!operands.ok() || !results.ok()) return BufferMismatch(frame);
  return MakeCall(frame, state, operands.data(), results.data());
}

XLA_FFI_Error* Judge(XLA_FFI_CallFrame* frame) {
  const PlanState* state = nullptr;
  if (XLA_FFI_Error* error = StateOf(frame, &state)) return error;
  Pointers operands(frame->args, frame->args.args, state->plan->outputs());
  if (!operands.ok()) {
    return MakeError(frame->api, "hostcall: no outcome to judge by");
  }
  return ErrorOfOutcome(frame, *state->plan, operands.data()[0]);
}

PyObject* g_raw = nullptr;  // guarded by the GIL

}  // namespace

XLA_FFI_Error* ExecuteCall(XLA_FFI_CallFrame* frame) {
  return Guarded(frame, Execute);
}

XLA_FFI_Error* ExecuteVerdict(XLA_FFI_CallFrame* frame) {
  return Guarded(frame, Judge);
}

void SetRawFunction(PyObject* function) {
  Py_XINCREF(function);
  Py_XSETREF(g_raw, function);
}

XLA_FFI_Error* ExecuteRaw(XLA_FFI_CallFrame* frame) {
  return Guarded(frame, [](XLA_FFI_CallFrame* f) -> XLA_FFI_Error* {
    GilGuard gil;
    Ref value = Ref::Steal(PyObject_CallNoArgs(g_raw));
    if (!value) {
      PyErr_Clear();
      return MakeError(f->api, "the raw function failed");
    }
    return nullptr;
  });
}

}  // namespace hostcall
