#include "handlers/run_call.h"

#include <cstring>
#include <exception>
#include <memory>
#include <optional>
#include <utility>

#include "base/bytes.h"
#include "base/engine.h"
#include "base/flight.h"
#include "base/report.h"
#include "base/signals.h"
#include "handlers/ffi.h"
#include "handlers/host_callback.h"
#include "invoke/invoke.h"
#include "invoke/profile.h"
#include "invoke/taps.h"
#include "plan/kind.h"

namespace hostcall {
namespace {

/// One device's call, or its part of a call that several devices make.
class DeviceCall final : public Team::Member {
 public:
  /// With a `fault`, the device can't make its call, and only lets the others go
  /// on: its own program gets the fault.
  DeviceCall(const Work& work, void* const* operands, void* const* results,
             void* stream, Team::Error fault = "")
      : Member(DeviceOrdinal(work.frame)),
        execution_{work.plan, device(), RunId(work.frame),
                   operands,  results,  stream},
        plan_(work.plan),
        frame_(work.frame),
        fault_(std::move(fault)) {}

  int64_t run() const { return execution_.run; }

  /// Makes the call, unless `where` keeps all rows back. Returns the text of the
  /// error, empty for success. Throws nothing, since other devices may wait for
  /// this call to end.
  Team::Error Call() override;
  void CopyFrom(const Member& leader) override {
    if (!fault_.empty()) return;
    void* const* from = static_cast<const DeviceCall&>(leader).execution_.results;
    for (size_t i = 0; i < plan_.results.size(); ++i) {
      CopyBytes(execution_.results[i], from[i], plan_.results[i].buffer_bytes());
    }
  }
  void FailsAlone(const Team::Error& error) override {
    Entry entry;
    if (!entry || !fault_.empty()) return;
    GilGuard gil;
    WarnOfLoneFailure(plan_, device(), error);
  }

 private:
  std::string Run(int64_t executions_before);
  template <typename Once>
  void MakeInside(const Once& once);

  const Execution execution_;
  const Plan& plan_;  ///< the execution's
  const XLA_FFI_CallFrame* const frame_;
  const Team::Error fault_;  ///< empty: the device can make its call
};

Team::Error DeviceCall::Call() {
  if (!fault_.empty()) return fault_;
  int64_t executions_before = -1;
  if (Masked(execution_, &executions_before)) return "";
  Entry entry;
  if (!entry) return ClosedText();
  try {
    return Run(executions_before);
  } catch (const std::exception& error) {
    return TextOf(error);
  }
  HOSTCALL_CATCH_THE_REST { return TextOfTheRest(); }
}

/// Makes the execution: the kind's native part, and what is left with Python.
/// Returns the text of the error, empty for success. The caller has entered the
/// engine, and does not hold the GIL.
std::string DeviceCall::Run(int64_t executions_before) {
  const Kind& kind = *plan_.kind;
  std::unique_ptr<Progress> progress;
  if (kind.has_native_part && !plan_.called_by_other_process &&
      kind.RunNative(execution_, &progress)) {
    return "";
  }
  const int64_t start = Ticks();
  Flight flight(plan_.NewEvent(kind.event(), device(), run(), start));
  if (progress && progress->Wait()) {
    flight.Ended(Ticks(), true);
    return "";
  }
  GilGuard gil;
  const PlainFloats plain;
  const int64_t attached = Ticks();
  flight.Entered(attached);
  Annotation annotation;
  if (IsProfiled(attached)) {
    annotation.Begin(plan_.hooks, -1, TicksToSeconds(attached - start));
  }
  Signals::Keep(attached);  // the thread that dispatched may wait for this call
  std::string text;
  MakeInside([&](bool scouts) {
    ActiveCall active(execution_, start);
    active.counted = true;
    active.executions_before = executions_before;
    active.scouts = scouts;
    active.inside = InsideHostCallback();
    const CallScope scope(active);
    const bool ok = Invoke(execution_, active, progress.get());
    if (active.asked) {
      PyErr_Clear();  // what ended this attempt, which is made again
    } else if (!ok) {
      text = TakeError(plan_, active);
    }
    if (!OnForeignThread()) StayIfLeftBehind();
    return active.asked;
  });
  if (!text.empty()) WatchForReport(ReturnsToPython());
  Counters::Part& counters = plan_.counters->mine();
  counters.gil_ticks.Add(attached - start);
  const int64_t end = Ticks();
  counters.python_ticks.Add(end - attached);
  flight.Ended(end, text.empty());
  return text;
}

/// Calls `once(scouts)`, inside a host callback if the plan says so. If it returns
/// true, the function would compute on the client that waits for it, and it is
/// called a second time, inside. Only pure calls scout, so repeating one is
/// allowed.
template <typename Once>
void DeviceCall::MakeInside(const Once& once) {
  const Inside inside = plan_.inside;
  if (InsideHostCallback() || inside == Inside::kNever ||
      (inside != Inside::kEverywhere && !OnForeignThread())) {
    once(false);
    return;
  }
  if (inside == Inside::kAsked && !plan_.asked.load(std::memory_order_relaxed)) {
    if (!once(true)) return;
    plan_.asked.store(true, std::memory_order_relaxed);  // later calls start inside
  }
  RunInsideHostCallback(frame_, [&] { once(false); });
}

/// Ends a call with its error, or "". If it tells its outcome, XLA gets no error,
/// even if the call failed (plan/outcome.h).
XLA_FFI_Error* Ended(const Work& work, int64_t run, const std::string& error,
                     void* const* results) {
  const Plan& plan = work.plan;
  if (!plan.returns_outcome) {
    return error.empty() ? nullptr : MakeError(work.frame->api, error);
  }
  if (!error.empty()) {
    plan.failures.Note(run, error);
    for (size_t i = 0; i < plan.results.size(); ++i) {
      FillBytes(results[i], 0, plan.results[i].buffer_bytes());
    }
  }
  WriteOutcome(error, results[plan.results.size()]);
  return nullptr;
}

/// The text with which a program fails here. `message` is the text of this
/// process's own error (`is_ours`), or what another process said. The GIL is held.
std::string TextOfVerdict(const Plan& plan, const std::string& message,
                          bool is_ours) {
  Ref text = Ref::Steal(PyUnicode_DecodeUTF8(
      message.data(), static_cast<Py_ssize_t>(message.size()), "ignore"));
  Ref verdict =
      CallMethod(plan.hooks, "on_verdict", text, is_ours ? Py_True : Py_False);
  const char* utf8 = verdict ? PyUnicode_AsUTF8(verdict.get()) : nullptr;
  if (utf8 != nullptr) return utf8;
  PyErr_WriteUnraisable(plan.hooks.get());  // the caller can't raise
  return message;
}

}  // namespace

bool IsCall(const Kind& kind) { return !Is<TapKind>(kind); }

const XLA_FFI_Buffer* OutcomeIn(const XLA_FFI_CallFrame* frame, const Plan& plan) {
  const auto results = static_cast<int64_t>(plan.result_bytes.size());
  const int64_t size = frame->args.size;
  if (plan.returns_outcome && (size == results || size == results + 1)) {
    const auto* outcome =
        static_cast<const XLA_FFI_Buffer*>(frame->args.args[size - results]);
    if (BytesOf(*outcome) == kOutcomeBytes) return outcome;
  }
  throw std::runtime_error(kBufferMismatch);
}

XLA_FFI_Error* ErrorOfOutcome(XLA_FFI_CallFrame* frame, const Plan& plan,
                              const void* outcome) {
  if (!HasFailed(outcome)) return nullptr;
  const int64_t run = RunId(frame);
  std::string error = plan.failures.Find(run);
  const bool is_ours = !error.empty();
  if (!is_ours) error = TextOfOutcome(outcome);
  if (Entry entry; entry) {
    GilGuard gil;
    error = TextOfVerdict(plan, error, is_ours);
    WatchForReport(ReturnsToPython());
  } else if (error.empty()) {
    error = ClosedText();
  }
  // The run's other devices then fail with the same text.
  if (!is_ours) plan.failures.Note(run, error);
  return MakeError(frame->api, error);
}

XLA_FFI_Error* FailWithTeam(const Work& work, const std::string& text) {
  DeviceCall call(work, nullptr, nullptr, nullptr, text);
  work.state.team->Meet(call.run(), call);
  return MakeError(work.frame->api, text);
}

XLA_FFI_Error* MakeCall(const Work& work, void* const* operands,
                        void* const* results, void* stream) {
  const Plan& plan = work.plan;
  // On a GPU's own memory each device makes its call: the host can't copy the
  // leader's results.
  const bool together = work.state.team && stream == nullptr;
  // First, as XLA takes some time to say which device and run it is.
  if (!together && !plan.counted && FilledForMask(plan, operands, results)) {
    return Ended(work, -1, "", results);
  }
  DeviceCall call(work, operands, results, stream);
  if (!together) return Ended(work, call.run(), call.Call(), results);
  // Recorded for each device: a device that does not come is what the others wait
  // for. Masked executions, which are many and short, are not.
  std::optional<Flight> flight;
  if (!plan.KeepsBack(operands)) {
    flight.emplace(
        plan.NewEvent(EventKind::kTeam, call.device(), call.run(), Ticks()));
  }
  const std::string text = work.state.team->Meet(call.run(), call);
  if (flight) flight->Ended(Ticks(), text.empty());
  return Ended(work, call.run(), text, results);
}

}  // namespace hostcall
