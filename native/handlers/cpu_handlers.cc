// The handlers use XLA's C interface, not its C++ templates, which would do work at
// each call that these handlers do not need.
//
// Threads. XLA enters handlers on any thread, normally without the GIL. If the
// caller of XLA holds it, Guarded releases it first. XLA is built without
// exceptions, so no exception may leave a handler.

#include <cstdint>
#include <cstring>

#include "base/bytes.h"
#include "base/engine.h"
#include "base/guards.h"
#include "base/last_run.h"
#include "base/report.h"
#include "handlers/ffi.h"
#include "handlers/handlers.h"
#include "handlers/plan_state.h"
#include "handlers/run_call.h"
#include "invoke/taps.h"
#include "plan/call_scope.h"
#include "queue/tap_queue.h"

namespace hostcall {
namespace {

XLA_FFI_Error* Execute(XLA_FFI_CallFrame* frame) {
  Work work(frame, &IsCall);
  const RunHere noted(&work.plan);
  return MakeCall(work, work.operands.data(), work.results.data());
}

XLA_FFI_Error* Judge(XLA_FFI_CallFrame* frame) {
  const Plan& plan = *FindState(frame).plan;
  return ErrorOfOutcome(frame, plan, OutcomeIn(frame, plan)->data);
}

XLA_FFI_Error* Link(XLA_FFI_CallFrame* frame) {
  const auto [in, out] = NumbersOfLink(frame);
  std::memcpy(out, in, sizeof(int32_t));
  return nullptr;
}

/// Copies a tap's operands into the queue, and XLA goes on. Nothing here takes the
/// GIL, unless Ctrl-C ends a wait. The thread waits for Python only if the queue is
/// full and `when_full="block"`.
XLA_FFI_Error* Tap(XLA_FFI_CallFrame* frame) {
  Work work(frame, &Is<TapKind>);
  const Plan& plan = work.plan;
  const RunHere noted(&plan);
  const TapKind& tap = TapOf(plan);
  void** operands = work.operands.data();
  for (size_t i = 0; tap.through && i < plan.args.size(); ++i) {
    void* out = work.results[i];
    const void* in = operands[i + (plan.masked ? 1 : 0)];
    // XLA mostly gives a result the memory of its operand, since the custom call
    // declares them as aliases.
    if (out != in) CopyBytes(out, in, plan.args[i].buffer_bytes());
  }
  if (tap.linked) std::memset(work.results[0], 0, sizeof(int32_t));
  // If all devices tap, a masked execution does not ask XLA for its device.
  // Otherwise the mask comes second, so that only devices that tap count it.
  if (tap.only.empty() && IsMasked(plan, operands)) return nullptr;
  const int device = DeviceOrdinal(frame);
  if (!IsWanted(tap, device) || IsMasked(plan, operands)) return nullptr;
  // Mostly a throttle leaves the execution out, and one that looks at the clock
  // only does not need the number of the run, which takes XLA 10 ns.
  Throttle* throttle = work.state.throttle.get();
  int64_t run = throttle == nullptr || throttle->counts() ? RunId(frame) : -1;
  if (IsSkipped(plan, throttle, device, run, operands)) return nullptr;
  if (run == -1) run = RunId(frame);
  Entry entry;
  if (!entry) return ClosedError(frame);
  try {
    PushTap(plan, device, run, operands);
  } catch (const PushInterrupted&) {
    GilGuard gil;
    WatchForReport(ReturnsToPython());
    throw;
  }
  return nullptr;
}

/// The handler around a body. Whatever fails in it is counted before its program
/// ends, also what is no failure of a user's function.
template <XLA_FFI_Error* (*kBody)(XLA_FFI_CallFrame*)>
XLA_FFI_Error* Handle(XLA_FFI_CallFrame* frame) {
  XLA_FFI_Error* const error = Guarded(frame, kBody);
  if (error != nullptr) ++g_failures;
  return error;
}

/// The same for all kinds.
constexpr XLA_FFI_Handler* kInstantiate = HandleInstantiate<&g_plan_type>;

}  // namespace

const Stages kCpuHandlers[] = {{"call", kInstantiate, Handle<Execute>},
                               {"tap", kInstantiate, Handle<Tap>},
                               {"link", nullptr, Handle<Link>},
                               {"verdict", kInstantiate, Handle<Judge>},
                               {"buffer", kInstantiate, Handle<Execute>},
                               {"graph", kInstantiate, Handle<Execute>}};

}  // namespace hostcall
