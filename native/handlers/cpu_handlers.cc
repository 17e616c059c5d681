// The handlers use XLA's C interface, not its C++ templates, which would do work at
// each call that these handlers do not need.
//
// Threads. XLA enters handlers on any thread, normally without the GIL. If the
// caller of XLA holds it, Guarded releases it first. XLA is built without
// exceptions, so no exception may leave a handler.

#include <cstdint>
#include <cstring>

#include "base/engine.h"
#include "base/guards.h"
#include "base/report.h"
#include "handlers/ffi.h"
#include "handlers/handlers.h"
#include "handlers/plan_state.h"
#include "handlers/run_call.h"
#include "invoke/tap_worker.h"
#include "plan/call_scope.h"
#include "plan/push_tap.h"
#include "queue/tap_space.h"

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

/// Copies a tap's operands into the queue, and XLA goes on. Nothing here takes the
/// GIL, unless Ctrl-C ends a wait. The thread waits for Python only if the queue is
/// full and `when_full="block"`.
XLA_FFI_Error* Tap(XLA_FFI_CallFrame* frame) {
  const PlanState* state = nullptr;
  if (XLA_FFI_Error* error = StateOf(frame, &state)) return error;
  const Plan& plan = *state->plan;
  if (!plan.tap) return BufferMismatch(frame);
  const TapSettings& tap = *plan.tap;
  // A linked tap has a number before its operands, which only orders it. Pointers
  // skips it as it skips a token.
  Pointers operands(frame->args, frame->args.args, plan.inputs());
  const size_t wanted =
      tap.through ? plan.args.size() : static_cast<size_t>(tap.linked);
  Pointers results(frame->rets, frame->rets.rets, wanted);
  if (!operands.ok() || !results.ok()) return BufferMismatch(frame);
  if (tap.through) {
    const size_t first = plan.masked ? 1 : 0;
    for (size_t i = 0; i < plan.args.size(); ++i) {
      void* out = results.data()[i];
      const void* in = operands.data()[first + i];
      // XLA mostly gives a result the memory of its operand, since the custom call
      // declares them as aliases.
      if (out != in) std::memcpy(out, in, plan.args[i].buffer_bytes());
    }
  }
  if (tap.linked) std::memset(results.data()[0], 0, sizeof(int32_t));
  // If all devices tap, a masked execution does not ask XLA for its device.
  // Otherwise the mask comes second, so that only devices that tap count it.
  if (tap.only.empty() && IsMasked(plan, operands.data())) return nullptr;
  const int device = DeviceOrdinal(frame);
  if (!IsWanted(plan, device) || IsMasked(plan, operands.data())) return nullptr;
  // Mostly a throttle leaves the execution out, and one that looks at the clock
  // only does not need the number of the run, which takes XLA 10 ns.
  Throttle* throttle = state->throttle.get();
  int64_t run = throttle == nullptr || throttle->counts() ? RunId(frame) : -1;
  if (IsSkipped(plan, throttle, device, run, operands.data())) return nullptr;
  if (run == -1) run = RunId(frame);
  Entry entry;
  if (!entry) return ClosedError(frame);
  try {
    PushOrDeliver(plan, device, run, operands.data());
  } catch (const PushInterrupted&) {
    GilGuard gil;
    WatchForReport(ReturnsToPython());
    throw;
  }
  return nullptr;
}

}  // namespace

XLA_FFI_Error* ExecuteCall(XLA_FFI_CallFrame* frame) {
  return Guarded(frame, Execute);
}

XLA_FFI_Error* ExecuteVerdict(XLA_FFI_CallFrame* frame) {
  return Guarded(frame, Judge);
}

XLA_FFI_Error* ExecuteTap(XLA_FFI_CallFrame* frame) { return Guarded(frame, Tap); }

XLA_FFI_Error* ExecuteLink(XLA_FFI_CallFrame* frame) {
  return Guarded(frame, [](XLA_FFI_CallFrame* f) -> XLA_FFI_Error* {
    if (XLA_FFI_Error* error = LinkFault(f)) return error;
    Pointers in(f->args, f->args.args, 1), out(f->rets, f->rets.rets, 1);
    if (!in.ok() || !out.ok()) return BufferMismatch(f);
    std::memcpy(out.data()[0], in.data()[0], sizeof(int32_t));
    return nullptr;
  });
}

}  // namespace hostcall
