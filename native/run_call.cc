#include "run_call.h"

#include <cstring>
#include <exception>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "buffer_call.h"
#include "engine.h"
#include "ffi.h"
#include "host_callback.h"
#include "invoke.h"
#include "report.h"

namespace hostcall {
namespace {

/// Calls `call`, inside a host callback where the plan says so. One that its scout
/// found computing on the client that waits for it is pure, and so made again.
template <typename Call>
void MakeInside(const Plan& plan, const CallSite& site, const Call& call) {
  const auto inside = [&] {
    RunInsideHostCallback(site.frame, [&] { call(Lookout::kInside); });
  };
  const bool xlas = OnForeignThread();
  if (InsideHostCallback()) {
    call(Lookout::kInside);
  } else if (plan.inside == Inside::kEverywhere ||
             (xlas && (plan.inside == Inside::kXlasThreads || plan.asked))) {
    inside();
  } else if (xlas && plan.scout) {
    const bool outer = std::exchange(ScoutAsked(), false);
    call(Lookout::kScout);
    if (!std::exchange(ScoutAsked(), outer)) return;
    plan.asked = true;
    inside();
  } else {
    call(Lookout::kGuard);
  }
}

/// Attaches, runs all rows, and gives the text of what failed, empty for nothing.
/// Native code runs without that.
std::string Run(const Plan& plan, const CallSite& site, const void* const* operands,
                void* const* results) {
  NativeStatus native;
  if (plan.buffers.address != 0) {
    native = RunNative(plan, operands, results, site.stream);
    if (native.ok()) return "";
  }
  const int64_t start = NowNs();
  GilGuard gil;
  if (gil.first_on_foreign_thread()) MarkForeignThread();
  const int64_t attached = NowNs();
  std::string text;
  const auto call = [&](Lookout lookout) {
    CallScope scope(plan, site.ordinal, lookout);
    scope.call().start_ns = start;
    scope.call().counted = true;
    scope.call().run = site.run;
    scope.call().stream = site.stream;
    scope.call().on_gpu = site.on_gpu;
    bool ok = false;
    if (!native.ok()) {
      RaiseStatus(plan, native);
    } else {
      ok = Invoke(plan, scope.call(), operands, results);
    }
    if (!ok) {
      if (lookout == Lookout::kScout && ScoutAsked()) {
        PyErr_Clear();
      } else {
        text = TakeError(plan, scope.call());
      }
    }
    if (!OnForeignThread() && Engine::Get().IsLeftBehind()) {
      GilRelease unlocked;
      StayForEver();
    }
  };
  MakeInside(plan, site, call);
  // Where this thread goes back to Python: its own, or a callback's around this
  // call.
  if (!text.empty() && (!OnForeignThread() || CurrentCall() != nullptr)) {
    WatchForReport();
  }
  plan.counters->gil_wait_ns += attached - start;
  plan.counters->python_ns += NowNs() - attached;
  return text;
}

/// A call that several devices make: hands it to their team, and waits for its end
/// as a collective would. Not with XLA's futures: a program that goes on in pieces
/// lets the next one start between them, and their collectives then wait for each
/// other's threads.
XLA_FFI_Error* MeetTeam(XLA_FFI_CallFrame* frame, const PlanState& state,
                        const CallSite& site, void* const* operands,
                        void* const* results) {
  Counted<Plan> plan = state.plan;

  Team::Member member;
  member.device = site.ordinal;
  member.results.assign(results, results + plan->results.size());
  std::vector<void*> in(operands, operands + plan->operands());
  member.job = [plan, site, in, out = member.results]() -> std::string {
    Entry entry;
    if (!entry) return ClosedText();
    try {
      return Run(*plan, site, in.data(), out.data());
      // This is a thread of the team's: above here nobody catches anything.
    } catch (const std::exception& error) {
      return TextOf(error);
    }
    HOSTCALL_CATCH_THE_REST { return TextOfTheRest(); }
  };
  auto ended = std::make_shared<std::promise<std::string>>();
  member.finish = [ended](const std::string& error) { ended->set_value(error); };
  member.alone = [plan, ordinal = site.ordinal](const std::string& error) {
    Entry entry;
    if (!entry) return;
    GilGuard gil;
    WarnOfLoneFailure(*plan, ordinal, error);
  };
  member.copy_from = [plan, out = member.results](const Team::Member& leader) {
    for (size_t i = 0; i < out.size(); ++i) {
      std::memcpy(out[i], leader.results[i], plan->results[i].buffer_bytes());
    }
  };
  // The team, not the state: the program may be gone when the call ends.
  std::shared_ptr<Team> team = state.team;
  std::future<std::string> end = ended->get_future();
  team->Arrive(site.run, std::move(member));
  const std::string error = end.get();
  return error.empty() ? nullptr : MakeError(frame->api, error);
}

}  // namespace

XLA_FFI_Error* FailWithTeam(XLA_FFI_CallFrame* frame, const PlanState& state,
                            CallSite site, const std::string& text) {
  Team::Member member;
  member.device = site.ordinal;
  member.job = [text] { return text; };
  auto ended = std::make_shared<std::promise<void>>();
  member.finish = [ended](const std::string&) { ended->set_value(); };
  member.alone = [](const std::string&) {};  // its own error says it
  member.copy_from = [](const Team::Member&) {};
  std::future<void> end = ended->get_future();
  std::shared_ptr<Team> team = state.team;
  team->Arrive(RunId(frame), std::move(member));
  end.get();
  return MakeError(frame->api, text);
}

XLA_FFI_Error* MakeCall(XLA_FFI_CallFrame* frame, const PlanState& state,
                        CallSite site, void* const* operands,
                        void* const* results) {
  const Plan& plan = *state.plan;
  site.frame = frame;
  // On a GPU's own memory each device calls: there is no copying from the leader's.
  const bool together = state.team && !site.on_gpu;
  if (together || plan.lend == Lend::kBuffers) site.run = RunId(frame);
  if (together) return MeetTeam(frame, state, site, operands, results);
  Entry entry;
  if (!entry) {
    return MakeError(frame->api, ClosedText(),
                     XLA_FFI_Error_Code_FAILED_PRECONDITION);
  }
  const std::string text = Run(plan, site, operands, results);
  return text.empty() ? nullptr : MakeError(frame->api, text);
}

}  // namespace hostcall
