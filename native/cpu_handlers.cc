// Written on XLA's C interface rather than its C++ templates: the handler's parts
// are few, and what it does not use it does not pay for.
//
// Lifetime. A plan is held by the Python handle that the executable keeps alive, by
// the slot table as long as that handle lives, and by every instantiated place of
// the program (`PlanState`, which XLA destroys with its executable). The last is
// what a run uses: an executable that is dropped while it runs in another thread is
// destroyed after the run, whatever Python has let go of meanwhile.
//
// Threads. Entered on any thread, without the GIL as XLA has it (and with it where
// somebody calls XLA so: GilGuard asks). No exception leaves a handler: XLA is
// built without them.

#include "cpu_handlers.h"

#include <cstring>
#include <exception>
#include <future>
#include <memory>
#include <string>
#include <string_view>

#include "engine.h"
#include "ffi.h"
#include "invoke.h"
#include "report.h"

namespace hostcall {
namespace {

XLA_FFI_TypeId g_type_id = XLA_FFI_UNKNOWN_TYPE_ID;

XLA_FFI_Error* Instantiate(XLA_FFI_CallFrame* frame) {
  const uint64_t number = Attribute(frame, "slot");
  Counted<Plan> plan = Slots().Find(number);
  if (!plan || plan->signature != Attribute(frame, "signature")) {
    return MakeError(
        frame->api,
        "hostcall: this program calls host function number " +
            std::to_string(number) +
            ", which this process doesn't have. It was compiled in another "
            "process, or its function is gone: trace and compile it here",
        XLA_FFI_Error_Code_FAILED_PRECONDITION);
  }
  std::shared_ptr<Team> team;
  if (plan->team_mode != TeamMode::kAlone) {
    team =
        std::make_shared<Team>(plan->team_mode, plan->team_size, plan->team_leader);
  }
  std::unique_ptr<Throttle> throttle = Throttle::For(plan->tap);
  auto* state =
      new PlanState{std::move(plan), std::move(team), std::move(throttle)};
  XLA_FFI_State_Set_Args args;
  args.struct_size = XLA_FFI_State_Set_Args_STRUCT_SIZE;
  args.extension_start = nullptr;
  args.ctx = frame->ctx;
  args.stage = XLA_FFI_ExecutionStage_INSTANTIATE;
  args.type_id = &g_type_id;
  args.state = state;
  XLA_FFI_Error* error = frame->api->XLA_FFI_State_Set(&args);
  if (error != nullptr) delete state;
  return error;
}

/// Attaches, runs all rows, and gives the text of what failed, empty for nothing.
std::string Run(const Plan& plan, int ordinal, const void* const* operands,
                void* const* results) {
  const int64_t start = NowNs();
  GilGuard gil;
  if (gil.first_on_foreign_thread()) MarkForeignThread();
  const int64_t attached = NowNs();
  std::string text;
  {
    CallScope scope(plan, ordinal);
    scope.call().start_ns = start;
    if (!Invoke(plan, scope.call(), operands, results)) {
      text = TakeError(plan, scope.call());
    }
  }
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
                        Pointers& operands, Pointers& results) {
  const int ordinal = DeviceOrdinal(frame);
  Counted<Plan> plan = state.plan;

  Team::Member member;
  member.device = ordinal;
  member.results.assign(results.data(), results.data() + plan->results.size());
  std::vector<void*> in(operands.data(), operands.data() + plan->operands());
  member.job = [plan, ordinal, in, out = member.results]() -> std::string {
    Entry entry;
    if (!entry) return ClosedText();
    try {
      return Run(*plan, ordinal, in.data(), out.data());
    } catch (const std::exception& e) {  // the thread is ours: nobody else would
      return std::string("hostcall: ") + e.what();
    }
  };
  auto ended = std::make_shared<std::promise<std::string>>();
  member.finish = [ended](const std::string& error) { ended->set_value(error); };
  member.alone = [plan, ordinal](const std::string& error) {
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
  team->Arrive(RunId(frame), std::move(member));
  const std::string error = end.get();
  return error.empty() ? nullptr : MakeError(frame->api, error);
}

XLA_FFI_Error* Execute(XLA_FFI_CallFrame* frame) {
  const PlanState* found = nullptr;
  if (XLA_FFI_Error* error = StateOf(frame, &found)) return error;
  const PlanState& state = *found;
  const Plan& plan = *state.plan;

  Pointers operands(frame->args, frame->args.args, plan.operands());
  Pointers results(frame->rets, frame->rets.rets, plan.results.size());
  if (!operands.ok() || !results.ok()) {
    return MakeError(frame->api,
                     "hostcall: the program passes another number of buffers "
                     "than it was lowered with");
  }
  if (state.team) return MeetTeam(frame, state, operands, results);
  Entry entry;
  if (!entry) {
    return MakeError(frame->api, ClosedText(),
                     XLA_FFI_Error_Code_FAILED_PRECONDITION);
  }
  const std::string text =
      Run(plan, DeviceOrdinal(frame), operands.data(), results.data());
  return text.empty() ? nullptr : MakeError(frame->api, text);
}

PyObject* g_raw = nullptr;

}  // namespace

SlotTable<Plan>& Slots() {
  static auto* table = new SlotTable<Plan>;  // outlives static destruction
  return *table;
}

XLA_FFI_Error* InstantiateCall(XLA_FFI_CallFrame* frame) {
  return Guarded(frame, Instantiate, g_type_id);
}

XLA_FFI_Error* ExecuteCall(XLA_FFI_CallFrame* frame) {
  return Guarded(frame, Execute);
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

XLA_FFI_Error* StateOf(XLA_FFI_CallFrame* frame, const PlanState** state) {
  XLA_FFI_State_Get_Args get;
  get.struct_size = XLA_FFI_State_Get_Args_STRUCT_SIZE;
  get.extension_start = nullptr;
  get.ctx = frame->ctx;
  get.stage = XLA_FFI_ExecutionStage_INSTANTIATE;
  get.type_id = &g_type_id;
  get.state = nullptr;
  if (XLA_FFI_Error* error = frame->api->XLA_FFI_State_Get(&get)) return error;
  *state = static_cast<const PlanState*>(get.state);
  return nullptr;
}

XLA_FFI_TypeId* PlanTypeId() { return &g_type_id; }

const XLA_FFI_TypeInfo* PlanTypeInfo() {
  static const XLA_FFI_TypeInfo info = [] {
    XLA_FFI_TypeInfo made;
    made.struct_size = XLA_FFI_TypeInfo_STRUCT_SIZE;
    made.extension_start = nullptr;
    made.deleter = [](void* state) { delete static_cast<PlanState*>(state); };
    return made;
  }();
  return &info;
}

}  // namespace hostcall
