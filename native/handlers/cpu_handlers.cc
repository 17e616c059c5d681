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

#include "handlers/cpu_handlers.h"

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>

#include "handlers/ffi.h"
#include "handlers/run_call.h"

namespace hostcall {
namespace {

// Of each of XLA's registries: a CUDA plugin has its own.
XLA_FFI_TypeId g_type_id = XLA_FFI_UNKNOWN_TYPE_ID;
XLA_FFI_TypeId g_cuda_type_id = XLA_FFI_UNKNOWN_TYPE_ID;

XLA_FFI_Error* Instantiate(XLA_FFI_CallFrame* frame, XLA_FFI_TypeId* type) {
  if (!CanFail(frame)) {
    std::fputs("hostcall: XLA's FFI interface has no way to report errors\n",
               stderr);
    std::abort();
  }
  if (const std::string fault = InterfaceFault(frame); !fault.empty()) {
    return MakeError(frame->api, fault, XLA_FFI_Error_Code_FAILED_PRECONDITION);
  }
  const uint64_t number = Attribute(frame, "slot");
  Counted<Plan> plan = Slots(number >= kAcross).Find(number % kAcross);
  if (!plan || plan->signature != Attribute(frame, "signature")) {
    return MakeError(
        frame->api,
        "hostcall: this program calls host function number " +
            std::to_string(number) +
            ", which this process doesn't have. It was exported or compiled in "
            "another process, or its function is gone: trace, compile and export "
            "it here",
        XLA_FFI_Error_Code_FAILED_PRECONDITION);
  }
  std::shared_ptr<Team> team;
  if (plan->team_mode != TeamMode::kAlone) {
    team =
        std::make_shared<Team>(plan->team_mode, plan->team_size, plan->team_leader);
  }
  std::unique_ptr<Throttle> throttle =
      Throttle::For(plan->tap.every_steps, plan->tap.every_ns, plan->tap.sample);
  auto* state =
      new PlanState{std::move(plan), std::move(team), std::move(throttle)};
  XLA_FFI_State_Set_Args args;
  args.struct_size = XLA_FFI_State_Set_Args_STRUCT_SIZE;
  args.extension_start = nullptr;
  args.ctx = frame->ctx;
  args.stage = XLA_FFI_ExecutionStage_INSTANTIATE;
  args.type_id = type;
  args.state = state;
  XLA_FFI_Error* error = frame->api->XLA_FFI_State_Set(&args);
  if (error != nullptr) delete state;
  return error;
}

XLA_FFI_Error* Execute(XLA_FFI_CallFrame* frame) {
  const PlanState* found = nullptr;
  if (XLA_FFI_Error* error = StateOf(frame, &found)) return error;
  const PlanState& state = *found;
  const Plan& plan = *state.plan;

  Pointers operands(frame->args, frame->args.args, plan.operands());
  Pointers results(frame->rets, frame->rets.rets, plan.outputs());
  if (!operands.ok() || !results.ok()) {
    return MakeError(frame->api,
                     "hostcall: the program passes another number of buffers "
                     "than it was lowered with");
  }
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

PyObject* g_raw = nullptr;

}  // namespace

SlotTable<Plan>& Slots(bool across) {
  static auto* local = new SlotTable<Plan>;  // outlive static destruction
  static auto* lasting = new SlotTable<Plan>(true);
  return across ? *lasting : *local;
}

XLA_FFI_Error* InstantiateCall(XLA_FFI_CallFrame* frame) {
  return Guarded(
      frame, [](XLA_FFI_CallFrame* f) { return Instantiate(f, &g_type_id); },
      g_type_id);
}

XLA_FFI_Error* InstantiateOnCuda(XLA_FFI_CallFrame* frame) {
  return Guarded(
      frame, [](XLA_FFI_CallFrame* f) { return Instantiate(f, &g_cuda_type_id); },
      g_cuda_type_id);
}

XLA_FFI_Error* InstantiateInGraph(XLA_FFI_CallFrame* frame) {
  return Guarded(
      frame, [](XLA_FFI_CallFrame* f) { return Instantiate(f, &g_cuda_type_id); },
      g_cuda_type_id, XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE);
}

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

XLA_FFI_Error* StateOf(XLA_FFI_CallFrame* frame, const PlanState** state,
                       XLA_FFI_TypeId* type) {
  XLA_FFI_State_Get_Args get;
  get.struct_size = XLA_FFI_State_Get_Args_STRUCT_SIZE;
  get.extension_start = nullptr;
  get.ctx = frame->ctx;
  get.stage = XLA_FFI_ExecutionStage_INSTANTIATE;
  get.type_id = type;
  get.state = nullptr;
  if (XLA_FFI_Error* error = frame->api->XLA_FFI_State_Get(&get)) return error;
  *state = static_cast<const PlanState*>(get.state);
  return nullptr;
}

XLA_FFI_TypeId* PlanTypeId() { return &g_type_id; }
XLA_FFI_TypeId* CudaPlanTypeId() { return &g_cuda_type_id; }

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
