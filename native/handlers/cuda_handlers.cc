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
#include "base/last_run.h"
#include "cuda/staging.h"
#include "handlers/ffi.h"
#include "handlers/handlers.h"
#include "handlers/plan_state.h"
#include "handlers/run_call.h"
#include "invoke/buffer_kind.h"
#include "invoke/taps.h"
#include "queue/tap_queue.h"

namespace hostcall {
namespace {

/// Pieces of the device's memory of these sizes.
std::vector<Span> Spans(Pointers& at, const std::vector<size_t>& sizes) {
  std::vector<Span> spans;
  for (size_t bytes : sizes) spans.push_back({at[spans.size()], bytes});
  return spans;
}

/// Ends a call whose values could not be brought to the host. Other devices and
/// processes wait for its outcome, so the program goes on with zeros and an outcome
/// that says that the call failed, without a text. Throws if the GPU takes no more
/// work.
XLA_FFI_Error* TellThatNoneWasMade(Work& work, CudaStream stream, const char* why) {
  work.plan.failures.Note(RunId(work.frame), why);
  if (work.state.team) {
    // The team's other devices get the error there; the outcome tells this one's.
    Drop(work.frame->api, FailWithTeam(work, why));
  }
  ScopedContext current(stream);
  const std::vector<Span> results = Spans(work.results, work.plan.result_bytes);
  for (const Span& span : results) {
    if (span.bytes != 0) Driver().Fill(stream, span.device, 0, span.bytes);
  }
  // The first byte of an outcome is 1 if the call failed.
  Driver().Fill(stream, results.back().device, 1, 1);
  return nullptr;
}

XLA_FFI_Error* CallOnHost(XLA_FFI_CallFrame* frame, CudaStream stream) {
  Work work(frame, &IsCall, &g_cuda_plan_type);
  std::optional<StagedCall> staged;
  try {
    const std::vector<Span> operands =
        Spans(work.operands, work.plan.operand_bytes);
    staged.emplace(Gpus::Get().for_calls, stream, operands,
                   Spans(work.results, work.plan.result_bytes));
    staged->Fetch();
    // Without operand bytes Fetch has waited for nothing. A call with an effect
    // must still not run before the device reaches it, so it waits here. Such a
    // call has a token, which is one more result.
    const bool effect =
        static_cast<size_t>(frame->rets.size) > work.plan.result_bytes.size();
    const bool waited =
        std::any_of(operands.begin(), operands.end(),
                    [](const Span& span) { return span.bytes != 0; });
    if (effect && !waited) {
      ScopedContext current(stream);
      Driver().Synchronize(stream);
    }
  } catch (const std::exception& e) {
    if (work.plan.returns_outcome)
      return TellThatNoneWasMade(work, stream, e.what());
    if (!work.state.team) throw;
    // The team's other devices would wait for this one.
    return FailWithTeam(work, e.what());
  }
  XLA_FFI_Error* error = MakeCall(
      work, const_cast<void* const*>(staged->operands()), staged->results());
  if (error == nullptr) staged->Store();
  return error;
}

XLA_FFI_Error* Judge(XLA_FFI_CallFrame* frame, CudaStream stream) {
  const Plan& plan = *FindState(frame, &g_cuda_plan_type).plan;
  const std::vector<Span> outcome{{OutcomeIn(frame, plan)->data, kOutcomeBytes}};
  StagedCall staged(Gpus::Get().for_calls, stream, outcome, {});
  staged.Fetch();
  return ErrorOfOutcome(frame, plan, staged.operands()[0]);
}

XLA_FFI_Error* OnBuffers(XLA_FFI_CallFrame* frame, CudaStream stream) {
  // Any other function would read the GPU's memory as the host's.
  Work work(frame, &Is<BufferKind>, &g_cuda_plan_type);
  for (const auto* leaves : {&work.plan.args, &work.plan.results}) {
    for (const Leaf& leaf : *leaves) {
      if (leaf.bits == 0 || work.plan.grid.empty()) continue;
      return MakeError(frame->api,
                       "hostcall: in a GPU's memory, rows of elements smaller than "
                       "a byte do not begin at a byte. Use "
                       "vmap_method='expand_dims'" HOSTCALL_CODE("hc-device"));
    }
  }
  ScopedContext current(stream);
  return MakeCall(work, work.operands.data(), work.results.data(), stream);
}

/// What a tap does without a block for its values. One that may turn out to be
/// masked or skipped displaces no other, which is surely wanted.
PoolIsFull IfPoolIsFull(const TapKind& tap, bool may_be_unwanted) {
  if (tap.when_full == WhenFull::kBlock) return PoolIsFull::kWait;
  const bool displaces = tap.when_full == WhenFull::kDropOldest && !may_be_unwanted;
  return displaces ? PoolIsFull::kLoseOldest : PoolIsFull::kLoseNewest;
}

XLA_FFI_Error* Tap(XLA_FFI_CallFrame* frame, CudaStream stream) {
  Work work(frame, &Is<TapKind>, &g_cuda_plan_type);
  const Plan& plan = work.plan;
  const TapKind& tap = TapOf(plan);
  const std::vector<Span> spans = Spans(work.operands, plan.operand_bytes);
  ScopedContext current(stream);
  for (size_t i = 0; tap.through && i < plan.args.size(); ++i) {
    const Span& in = spans[i + (plan.masked ? 1 : 0)];
    void* out = work.results[i];
    if (out == in.device || in.bytes == 0) continue;
    Driver().CopyOnDevice(stream, out, in.device, in.bytes);
  }
  if (tap.linked) Driver().Fill(stream, work.results[0], 0, sizeof(int32_t));
  const int device = DeviceOrdinal(frame);
  if (!IsWanted(tap, device)) return nullptr;
  // Executions that `where` keeps back do not count for `every`, and those with the
  // flag `always` go through. Both are still on the device here, so a tap that has
  // one of them asks the throttle later, when its values are on the host.
  std::shared_ptr<Throttle> later =
      plan.masked || tap.always ? work.state.throttle : nullptr;
  const int64_t run = RunId(frame);
  if (!later && IsSkipped(plan, work.state.throttle.get(), device, run, nullptr)) {
    return nullptr;
  }
  // Only refuses programs of a closed engine. Deliver, which runs after this
  // returns, enters the engine itself.
  if (const Entry entry; !entry) return ClosedError(frame);
  const bool nested = tap.nested || t_delivers_taps;
  if (tap.when_full == WhenFull::kBlock && !nested) AwaitSpace(plan, device, run);
  // Holds references to the plan and the throttle, since XLA may destroy the state
  // before the driver's thread runs this. If it drops the plan's last reference,
  // the plan goes to the graveyard: the driver's thread must not wait for the GIL.
  Receiver receiver;
  receiver.deliver = [plan = work.state.plan, later, device,
                      run](const void* const* data) {
    Entry entry;
    if (!entry || IsMasked(*plan, data)) return;
    if (IsSkipped(*plan, later.get(), device, run, data)) return;
    PushTap(*plan, device, run, data, true);
  };
  receiver.lose = [plan = work.state.plan] {
    plan->counts->dropped.fetch_add(1, std::memory_order_relaxed);
    TapQueue::Get().CountDropped();
  };
  Gpus& gpus = Gpus::Get();
  StageTap(gpus.for_taps, gpus.streams, stream, spans,
           IfPoolIsFull(tap, later != nullptr), std::move(receiver));
  return nullptr;
}

XLA_FFI_Error* Link(XLA_FFI_CallFrame* frame, CudaStream stream) {
  const auto [in, out] = NumbersOfLink(frame);
  ScopedContext current(stream);
  Driver().CopyOnDevice(stream, out, in, sizeof(int32_t));
  return nullptr;
}

/// The handler around a body, which gets the stream that XLA gives. Whatever fails
/// in it is counted before its program ends (bindings/dispatch_bindings.cc).
template <XLA_FFI_Error* (*kBody)(XLA_FFI_CallFrame*, CudaStream),
          uint32_t kTraits = 0>
XLA_FFI_Error* Handle(XLA_FFI_CallFrame* frame) {
  const auto body = [](XLA_FFI_CallFrame* f) {
    void* stream = StreamOf(f);
    if (stream != nullptr) return kBody(f, static_cast<CudaStream>(stream));
    return MakeError(f->api, "hostcall: XLA provided no GPU stream");
  };
  XLA_FFI_Error* const error =
      Guarded(frame, body, XLA_FFI_UNKNOWN_TYPE_ID, kTraits);
  if (error != nullptr) ++g_failures;
  return error;
}

/// Of a place that XLA may record into a command buffer.
constexpr uint32_t kRecorded = XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE;
/// Of all other places.
constexpr XLA_FFI_Handler* kInstantiate = HandleInstantiate<&g_cuda_plan_type>;

}  // namespace

const Stages kCudaHandlers[] = {
    {"call", kInstantiate, Handle<CallOnHost>},
    {"tap", kInstantiate, Handle<Tap>},
    {"link", nullptr, Handle<Link>},
    {"verdict", kInstantiate, Handle<Judge>},
    {"buffer", kInstantiate, Handle<OnBuffers>},
    {"graph", HandleInstantiate<&g_cuda_plan_type, kRecorded>,
     Handle<OnBuffers, kRecorded>}};

}  // namespace hostcall
