// Threads. XLA enters handlers on the threads that enqueue a program's work,
// without the GIL, and enqueues the next piece when they return. The work that a
// handler puts on the stream runs later, in order. staging.h does the copies, and
// says what holds their memory and what happens if one fails.
//
// A blocking tap waits for space in the tap queue here, before its copies are
// enqueued. The driver's thread, which pushes the tap later, must never wait.

#include <algorithm>
#include <exception>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/code.h"
#include "base/engine.h"
#include "cuda/staging.h"
#include "cuda/streams.h"
#include "handlers/ffi.h"
#include "handlers/handlers.h"
#include "handlers/plan_state.h"
#include "handlers/run_call.h"
#include "invoke/tap_worker.h"
#include "plan/push_tap.h"
#include "queue/tap_queue.h"

namespace hostcall {
namespace {

/// What most handlers start from: the frame, its stream, operands and results.
/// Lives on the handler's stack.
struct Work {
  Work(XLA_FFI_CallFrame* f, const PlanState& s, void* on, size_t n_results)
      : frame(f),
        state(s),
        stream(static_cast<CudaStream>(on)),
        operands(f->args, f->args.args, s.plan->inputs()),
        results(f->rets, f->rets.rets, n_results) {}
  bool ok() const { return operands.ok() && results.ok(); }
  /// All operands on the device: the mask first, the flag `always` last.
  std::vector<Span> OperandSpans() {
    return Spans(operands, state.plan->InputSizes());
  }
  /// All results on the device, the outcome last.
  std::vector<Span> ResultSpans() {
    return Spans(results, state.plan->OutputSizes());
  }
  static std::vector<Span> Spans(Pointers& at, const std::vector<size_t>& sizes) {
    std::vector<Span> spans;
    for (size_t bytes : sizes) spans.push_back({at.data()[spans.size()], bytes});
    return spans;
  }

  XLA_FFI_CallFrame* frame;
  const PlanState& state;
  CudaStream stream;
  Pointers operands, results;
};

/// Ends a call whose values could not be brought to the host. Other devices and
/// processes wait for its outcome, so the program goes on with zeros and an outcome
/// that says that the call failed, without a text. Throws if the GPU takes no more
/// work.
XLA_FFI_Error* TellThatNoneWasMade(Work& work, const char* why) {
  const PlanState& state = work.state;
  state.plan->failures.Note(RunId(work.frame), why);
  if (state.team) {
    // The team's other devices get the error there; the outcome tells this one's.
    Drop(work.frame->api, FailWithTeam(work.frame, state, why));
  }
  ScopedContext current(Driver(), work.stream);
  const std::vector<Span> results = work.ResultSpans();
  for (const Span& span : results) {
    Driver().Fill(work.stream, span.device, 0, span.bytes);
  }
  // The first byte of an outcome is 1 if the call failed.
  Driver().Fill(work.stream, results.back().device, 1, 1);
  return nullptr;
}

XLA_FFI_Error* CallOnHost(XLA_FFI_CallFrame* frame, void* stream,
                          XLA_FFI_TypeId* type) {
  const PlanState* state = nullptr;
  if (XLA_FFI_Error* error = StateOf(frame, &state, type)) return error;
  Work work(frame, *state, stream, state->plan->outputs());
  if (state->plan->tap || !work.ok()) return BufferMismatch(frame);
  const CudaDriver& driver = Driver();
  std::optional<StagedCall> staged;
  try {
    const std::vector<Span> operands = work.OperandSpans();
    staged.emplace(driver, Gpus::Get().for_calls, work.stream, operands,
                   work.ResultSpans());
    staged->Fetch();
    // Without operand bytes Fetch has waited for nothing. A call with an effect
    // must still not run before the device reaches it, so it waits here. Such a
    // call has a token, which is one more result.
    const bool effect =
        static_cast<size_t>(frame->rets.size) > state->plan->outputs();
    const bool waited =
        std::any_of(operands.begin(), operands.end(),
                    [](const Span& span) { return span.bytes != 0; });
    if (effect && !waited) {
      ScopedContext current(driver, work.stream);
      driver.Synchronize(work.stream);
    }
  } catch (const std::exception& e) {
    if (state->plan->tells) return TellThatNoneWasMade(work, e.what());
    if (!state->team) throw;
    // The team's other devices would wait for this one.
    return FailWithTeam(frame, *state, e.what());
  }
  XLA_FFI_Error* error =
      MakeCall(frame, *state, const_cast<void* const*>(staged->operands()),
               staged->results());
  if (error == nullptr) staged->Store();
  return error;
}

XLA_FFI_Error* Judge(XLA_FFI_CallFrame* frame, void* stream, XLA_FFI_TypeId* type) {
  const PlanState* state = nullptr;
  if (XLA_FFI_Error* error = FindState(frame, &state, type)) return error;
  const XLA_FFI_Buffer* told = OutcomeIn(frame, *state->plan);
  if (told == nullptr) return BufferMismatch(frame);
  const std::vector<Span> outcome{{told->data, kOutcomeBytes}};
  StagedCall staged(Driver(), Gpus::Get().for_calls,
                    static_cast<CudaStream>(stream), outcome, {});
  staged.Fetch();
  return ErrorOfOutcome(frame, *state->plan, staged.operands()[0]);
}

XLA_FFI_Error* OnBuffers(XLA_FFI_CallFrame* frame, void* stream,
                         XLA_FFI_TypeId* type) {
  const PlanState* state = nullptr;
  if (XLA_FFI_Error* error = StateOf(frame, &state, type)) return error;
  Work work(frame, *state, stream, state->plan->results.size());
  // Any other function would read the GPU's memory as the host's.
  const bool takes = !state->plan->tap && state->plan->lend == Lend::kBuffers;
  if (!takes || !work.ok()) return BufferMismatch(frame);
  for (const auto* leaves : {&state->plan->args, &state->plan->results}) {
    for (const Leaf& leaf : *leaves) {
      if (leaf.bits == 0 || state->plan->grid.empty()) continue;
      return MakeError(frame->api,
                       "hostcall: in a GPU's memory, rows of elements smaller than "
                       "a byte do not begin at a byte. Use "
                       "vmap_method='expand_dims'" HOSTCALL_CODE("hc-device"));
    }
  }
  ScopedContext current(Driver(), work.stream);
  return MakeCall(frame, *state, work.operands.data(), work.results.data(), stream);
}

XLA_FFI_Error* Tap(XLA_FFI_CallFrame* frame, void* stream, XLA_FFI_TypeId* type) {
  const PlanState* state = nullptr;
  if (XLA_FFI_Error* error = StateOf(frame, &state, type)) return error;
  const Plan& plan = *state->plan;
  if (!plan.tap) return BufferMismatch(frame);
  const TapSettings& tap = *plan.tap;
  const size_t wanted =
      tap.through ? plan.args.size() : static_cast<size_t>(tap.linked);
  Work work(frame, *state, stream, wanted);
  if (!work.ok()) return BufferMismatch(frame);
  const CudaDriver& driver = Driver();
  const std::vector<Span> spans = work.OperandSpans();
  ScopedContext current(driver, work.stream);
  for (size_t i = 0; tap.through && i < plan.args.size(); ++i) {
    const Span& in = spans[i + (plan.masked ? 1 : 0)];
    void* out = work.results.data()[i];
    if (out != in.device)
      driver.CopyOnDevice(work.stream, out, in.device, in.bytes);
  }
  if (tap.linked) {
    driver.Fill(work.stream, work.results.data()[0], 0, sizeof(int32_t));
  }
  const int device = DeviceOrdinal(frame);
  if (!IsWanted(plan, device)) return nullptr;
  // Executions that `where` keeps back do not count for `every`, and those with the
  // flag `always` go through. Both are still on the device here, so a tap that has
  // one of them asks the throttle later, when its values are on the host.
  std::shared_ptr<Throttle> later =
      plan.masked || tap.always ? state->throttle : nullptr;
  const int64_t run = RunId(frame);
  if (!later && IsSkipped(plan, state->throttle.get(), device, run, nullptr)) {
    return nullptr;
  }
  // Only refuses programs of a closed engine. Deliver, which runs after this
  // returns, enters the engine itself.
  if (const Entry entry; !entry) return ClosedError(frame);
  const bool nested = tap.nested || t_delivers_taps;
  const bool blocks = tap.when_full == WhenFull::kBlock;
  if (blocks && !nested) AwaitSpace(plan, device, run);
  // Holds references to the plan and the throttle, since XLA may destroy the state
  // before the driver's thread runs this. If it drops the plan's last reference,
  // the plan goes to the graveyard: the driver's thread must not wait for the GIL.
  Receiver receiver;
  receiver.deliver = [plan = state->plan, later, device,
                      run](const void* const* data) {
    Entry entry;
    if (!entry || IsMasked(*plan, data)) return;
    if (IsSkipped(*plan, later.get(), device, run, data)) return;
    PushOrDeliver(*plan, device, run, data, true);
  };
  receiver.lose = [plan = state->plan] {
    plan->counts->dropped.fetch_add(1, std::memory_order_relaxed);
    TapQueue::Get().CountDropped();
  };
  Gpus& gpus = Gpus::Get();
  StageTap(driver, gpus.for_taps, gpus.streams, work.stream, spans, blocks,
           std::move(receiver));
  return nullptr;
}

XLA_FFI_Error* Link(XLA_FFI_CallFrame* frame, void* stream, XLA_FFI_TypeId*) {
  if (XLA_FFI_Error* error = LinkFault(frame)) return error;
  Pointers in(frame->args, frame->args.args, 1);
  Pointers out(frame->rets, frame->rets.rets, 1);
  if (!in.ok() || !out.ok()) {
    return MakeError(frame->api, "hostcall: a link has one operand and one result");
  }
  const auto on = static_cast<CudaStream>(stream);
  ScopedContext current(Driver(), on);
  Driver().CopyOnDevice(on, out.data()[0], in.data()[0], sizeof(int32_t));
  return nullptr;
}

/// A handler's work on a stream. `type` is the type of the states in the registry
/// of the runtime that runs it.
using Body = XLA_FFI_Error* (*)(XLA_FFI_CallFrame*, void* stream,
                                XLA_FFI_TypeId* type);

/// Runs a body on the stream that XLA gives.
XLA_FFI_Error* OnXlasStream(XLA_FFI_CallFrame* frame, Body body,
                            uint32_t traits = 0) {
  return Guarded(
      frame,
      [body](XLA_FFI_CallFrame* f) -> XLA_FFI_Error* {
        void* stream = StreamOf(f);
        if (stream == nullptr) {
          return MakeError(f->api, "hostcall: XLA provided no GPU stream");
        }
        return body(f, stream, CudaPlanTypeId());
      },
      XLA_FFI_UNKNOWN_TYPE_ID, traits);
}

}  // namespace

XLA_FFI_Error* ExecuteCallOnCuda(XLA_FFI_CallFrame* f) {
  return OnXlasStream(f, CallOnHost);
}
XLA_FFI_Error* ExecuteTapOnCuda(XLA_FFI_CallFrame* f) {
  return OnXlasStream(f, Tap);
}
XLA_FFI_Error* ExecuteLinkOnCuda(XLA_FFI_CallFrame* f) {
  return OnXlasStream(f, Link);
}
XLA_FFI_Error* ExecuteVerdictOnCuda(XLA_FFI_CallFrame* f) {
  return OnXlasStream(f, Judge);
}
XLA_FFI_Error* ExecuteBuffersOnCuda(XLA_FFI_CallFrame* f) {
  return OnXlasStream(f, OnBuffers);
}
XLA_FFI_Error* ExecuteBuffersInGraph(XLA_FFI_CallFrame* f) {
  return OnXlasStream(f, OnBuffers,
                      XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE);
}

}  // namespace hostcall
