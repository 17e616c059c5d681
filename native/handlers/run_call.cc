#include "handlers/run_call.h"

#include <cstring>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "base/engine.h"
#include "base/flight.h"
#include "base/report.h"
#include "base/signals.h"
#include "buffer/buffer_call.h"
#include "handlers/ffi.h"
#include "handlers/host_callback.h"
#include "invoke/invoke.h"
#include "plan/feed_take.h"

namespace hostcall {
namespace {

/// Where a call comes from.
struct CallSite {
  const XLA_FFI_CallFrame* frame;  ///< the handler's; outlives the call
  int ordinal;                     ///< the device
  int64_t run;                     ///< XLA's number of the execution
  void* stream;  ///< XLA's stream if operands and results are on a GPU, else null
  const Before* before = nullptr;  ///< with `keep=`: the executions before this one
};

/// Calls `call`, inside a host callback if the plan says so. If a scout finds that
/// the function computes on the client that waits for it, the call is made a second
/// time, inside. Only pure calls have a scout, so repeating one is allowed.
template <typename Call>
void MakeInside(const Plan& plan, const CallSite& site, const Call& call) {
  const auto inside = [&] {
    RunInsideHostCallback(site.frame, [&] { call(Lookout::kInside); });
  };
  const bool xlas = OnForeignThread();
  if (InsideHostCallback()) {
    call(Lookout::kInside);
  } else if (plan.inside == Inside::kEverywhere ||
             (xlas && (plan.inside == Inside::kXlasThreads ||
                       plan.asked.load(std::memory_order_relaxed)))) {
    inside();
  } else if (xlas && plan.scout) {
    {
      const ScoutLooks looks;
      call(Lookout::kScout);
      if (!ScoutLooks::HasAsked()) return;
    }
    plan.asked.store(true, std::memory_order_relaxed);  // later calls start inside
    inside();
  } else {
    call(Lookout::kGuard);
  }
}

/// How long a device waits for an item before it enters Python, where the wait is
/// seen by hc.monitor.status(), and ends by Ctrl-C and by timeout=. A wait within
/// this time costs no Python.
constexpr int64_t kPatienceNs = 10'000'000;

/// Attaches to Python and runs all rows; native code runs without Python, unless it
/// fails. Returns the text of the error, empty for success. The caller has entered
/// the engine, and does not hold the GIL.
std::string Run(const Plan& plan, const CallSite& site, const void* const* operands,
                void* const* results) {
  NativeStatus native;
  if (plan.buffers.address != 0 && !plan.elsewhere) {
    native = RunNative(plan, operands, results, site.stream);
    if (native.ok()) return "";
  }
  std::unique_ptr<FeedTake> take;  // no optional: each call would zero all of it
  if (plan.feed) {
    if (TakeNow(plan, site.ordinal, results)) return "";
    take = std::make_unique<FeedTake>(plan, site.ordinal, operands, results);
    if (take->Go(0)) return "";
  }
  const int64_t start = Ticks();
  Flight flight(plan.NewEvent(plan.feed ? EventKind::kFeed : EventKind::kCall,
                              site.ordinal, site.run, start));
  if (take && take->Go(kPatienceNs)) {
    flight.Ended(Ticks(), true);
    return "";
  }
  GilGuard gil;
  const PlainFloats plain;
  const int64_t attached = Ticks();
  flight.Entered(attached);
  Signals::Keep(attached);  // the thread that dispatched may wait for this call
  std::string text;
  const auto call = [&](Lookout lookout) {
    ActiveCall active(plan, site.ordinal, site.run, start);
    active.counted = true;
    active.stream = site.stream;
    active.before = site.before;
    active.feed = take.get();
    const CallScope scope(active, lookout);
    bool ok = false;
    if (!native.ok()) {
      RaiseStatus(plan, native);
    } else {
      ok = Invoke(plan, active, operands, results);
    }
    if (!ok) {
      if (lookout == Lookout::kScout && ScoutLooks::HasAsked()) {
        PyErr_Clear();  // the scout's exception; MakeInside repeats the call
      } else {
        text = TakeError(plan, active);
      }
    }
    if (!OnForeignThread()) StayIfLeftBehind();
  };
  MakeInside(plan, site, call);
  if (!text.empty()) WatchForReport(ReturnsToPython());
  Counters::Part& counters = plan.counters->mine();
  counters.gil_ticks.Add(attached - start);
  const int64_t end = Ticks();
  counters.python_ticks.Add(end - attached);
  flight.Ended(end, text.empty());
  return text;
}

/// Enters the engine and calls Run. Throws nothing, since other devices may wait
/// for this call to end.
std::string TextOfRun(const Plan& plan, const CallSite& site,
                      const void* const* operands, void* const* results) {
  Entry entry;
  if (!entry) return ClosedText();
  try {
    return Run(plan, site, operands, results);
  } catch (const std::exception& error) {
    return TextOf(error);
  }
  HOSTCALL_CATCH_THE_REST { return TextOfTheRest(); }
}

/// Makes one device's call, unless `where` keeps all rows back. Returns as
/// TextOfRun.
std::string MakeOne(const Plan& plan, CallSite site, void* const* operands,
                    void* const* results) {
  Before before;
  if (Masked(plan, site.ordinal, site.run, operands, results, &before)) return "";
  if (plan.history) site.before = &before;
  return TextOfRun(plan, site, operands, results);
}

/// A device's part of a call that several devices make. With a `fault`, the device
/// can't make its call, and only lets the others go on: its own program gets the
/// fault.
class Visit final : public Team::Member {
 public:
  Visit(const Plan& plan, const CallSite& site, void* const* operands,
        void* const* results, Team::Error fault = "")
      : Member(site.ordinal),
        plan_(plan),
        site_(site),
        operands_(operands),
        results_(results),
        fault_(std::move(fault)) {}

  Team::Error Call() override {
    return fault_.empty() ? MakeOne(plan_, site_, operands_, results_) : fault_;
  }
  void CopyFrom(const Member& leader) override {
    if (!fault_.empty()) return;
    void* const* from = static_cast<const Visit&>(leader).results_;
    for (size_t i = 0; i < plan_.results.size(); ++i) {
      std::memcpy(results_[i], from[i], plan_.results[i].buffer_bytes());
    }
  }
  void FailsAlone(const Team::Error& error) override {
    Entry entry;
    if (!entry || !fault_.empty()) return;
    GilGuard gil;
    WarnOfLoneFailure(plan_, site_.ordinal, error);
  }

 private:
  const Plan& plan_;
  const CallSite& site_;
  void* const* operands_;
  void* const* results_;
  const Team::Error fault_;
};

/// Ends a call with its error, or "". If it tells its outcome, XLA gets no error,
/// even if the call failed (plan/outcome.h).
XLA_FFI_Error* Ended(const Plan& plan, const CallSite& site,
                     const std::string& error, void* const* results) {
  if (!plan.tells) {
    return error.empty() ? nullptr : MakeError(site.frame->api, error);
  }
  if (!error.empty()) {
    plan.failures.Note(site.run, error);
    for (size_t i = 0; i < plan.results.size(); ++i) {
      std::memset(results[i], 0, plan.results[i].buffer_bytes());
    }
  }
  WriteOutcome(error, results[plan.results.size()]);
  return nullptr;
}

/// The text with which a program fails here. `said` is the text of this process's
/// own error (`is_ours`), or what another process said. The GIL is held.
std::string TextOfVerdict(const Plan& plan, const std::string& said, bool is_ours) {
  Ref text = Ref::Steal(PyUnicode_DecodeUTF8(
      said.data(), static_cast<Py_ssize_t>(said.size()), "ignore"));
  Ref error = Ask(plan.info, "on_verdict", text, is_ours ? Py_True : Py_False);
  const char* utf8 = error ? PyUnicode_AsUTF8(error.get()) : nullptr;
  if (utf8 != nullptr) return utf8;
  PyErr_WriteUnraisable(plan.info.get());  // the caller can't raise
  return said;
}

}  // namespace

const XLA_FFI_Buffer* OutcomeIn(const XLA_FFI_CallFrame* frame, const Plan& plan) {
  const auto wanted = static_cast<int64_t>(plan.outputs());
  const int64_t size = frame->args.size;
  if (plan.tells && (size == wanted || size == wanted + 1)) {
    const auto* told =
        static_cast<const XLA_FFI_Buffer*>(frame->args.args[size - wanted]);
    if (BytesOf(*told) == kOutcomeBytes) return told;
  }
  throw XlaError{BufferMismatch(frame)};
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
  const CallSite site{work.frame, DeviceOrdinal(work.frame), RunId(work.frame),
                      nullptr};
  Visit visit(work.plan, site, nullptr, nullptr, text);
  work.state.team->Meet(site.run, visit);
  return MakeError(work.frame->api, text);
}

XLA_FFI_Error* MakeCall(const Work& work, void* const* operands,
                        void* const* results, void* stream) {
  const Plan& plan = work.plan;
  const XLA_FFI_CallFrame* frame = work.frame;
  // On a GPU's own memory each device makes its call: the host can't copy the
  // leader's results.
  const bool together = work.state.team && stream == nullptr;
  if (!together && !plan.history && FilledForMask(plan, operands, results)) {
    return Ended(plan, CallSite{frame, -1, -1, stream}, "", results);
  }
  const CallSite site{frame, DeviceOrdinal(frame), RunId(frame), stream};
  std::string text;
  if (together) {
    // Recorded for each device: a device that does not come is what the others wait
    // for. Masked executions, which are many and short, are not.
    std::optional<Flight> flight;
    if (!plan.KeepsBack(operands)) {
      flight.emplace(
          plan.NewEvent(EventKind::kTeam, site.ordinal, site.run, Ticks()));
    }
    Visit visit(plan, site, operands, results);
    text = work.state.team->Meet(site.run, visit);
    if (flight) flight->Ended(Ticks(), text.empty());
  } else {
    text = plan.history ? MakeOne(plan, site, operands, results)
                        : TextOfRun(plan, site, operands, results);
  }
  return Ended(plan, site, text, results);
}

}  // namespace hostcall
