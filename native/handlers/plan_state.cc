#include "handlers/plan_state.h"

#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>

#include "base/code.h"
#include "base/engine.h"
#include "base/guards.h"
#include "handlers/ffi.h"

namespace hostcall {
namespace {

// XLA writes the ids when Python registers the types.
XLA_FFI_TypeId g_type_id = XLA_FFI_UNKNOWN_TYPE_ID;
XLA_FFI_TypeId g_cuda_type_id = XLA_FFI_UNKNOWN_TYPE_ID;

/// The state of a place with this plan.
std::unique_ptr<PlanState> StateFor(Counted<Plan> plan) {
  auto state = std::make_unique<PlanState>();
  if (plan->team) state->team = std::make_unique<Team>(*plan->team);
  if (plan->tap) {
    state->throttle = Throttle::For(plan->tap->every_steps, plan->tap->every_ns,
                                    plan->tap->sample);
  }
  state->plan = std::move(plan);
  return state;
}

/// Asks Python for a plan, on a thread that compiles, loads or runs a program.
/// `ask` returns the plan or throws. Returns XLA's error or null.
template <typename Ask>
XLA_FFI_Error* AskPython(XLA_FFI_CallFrame* frame, XLA_FFI_Error_Code code,
                         Counted<Plan>* plan, Ask ask) {
  Entry entry;
  if (!entry) return ClosedError(frame);
  // If the thread holds the GIL, so does the guard; no lock of XLA's is known to be
  // held here.
  GilGuard gil;
  try {
    *plan = ask();
    return nullptr;
  } catch (const std::exception& error) {
    return MakeError(frame->api, error.what(), code);
  }
}

/// Asks Python to read a text. Returns XLA's error, or null with the plan in
/// `*plan` if there are buffers.
XLA_FFI_Error* ReadText(XLA_FFI_CallFrame* frame, std::string_view text,
                        bool on_cuda, const std::vector<BufferType>* buffers,
                        Counted<Plan>* plan) {
  return AskPython(frame, XLA_FFI_Error_Code_FAILED_PRECONDITION, plan,
                   [&] { return g_plan_makers.of_text(text, on_cuda, buffers); });
}

/// The types of all operands and results that are not tokens.
std::vector<BufferType> TypesOf(const XLA_FFI_CallFrame* frame) {
  std::vector<BufferType> all;
  const auto add = [&all](int64_t size, void* const* items) {
    for (int64_t i = 0; i < size; ++i) {
      const auto* buffer = static_cast<const XLA_FFI_Buffer*>(items[i]);
      if (buffer->dtype == XLA_FFI_DataType_TOKEN) continue;
      BufferType& type = all.emplace_back();
      type.push_back(buffer->dtype);
      type.insert(type.end(), buffer->dims, buffer->dims + buffer->rank);
    }
  };
  add(frame->args.size, frame->args.args);
  add(frame->rets.size, frame->rets.rets);
  return all;
}

/// The bytes that XLA passes for a leaf. An element of float0 has none here, and is
/// a bool there.
size_t XlasBytes(const Leaf& leaf) {
  if (leaf.bits == 0 && leaf.row_bytes == 0) {
    return static_cast<size_t>(leaf.count * leaf.rows);
  }
  return leaf.buffer_bytes();
}

/// Whether XLA's buffers have the sizes that a plan reads and writes. That holds
/// for programs that were lowered here, and for texts, whose shapes Python has
/// compared. This compares what the engine made of them, so that memory is safe
/// whatever a file says: a program that JAX's own loaders read may name any plan of
/// this process.
bool FitsBuffers(const Plan& plan, const XLA_FFI_CallFrame* frame) {
  std::vector<size_t> in, out;
  if (plan.masked) in.push_back(static_cast<size_t>(plan.mask_rows));
  for (const Leaf& leaf : plan.args) in.push_back(XlasBytes(leaf));
  if (plan.tap && plan.tap->always) in.push_back(1);
  if (plan.tap && plan.tap->through) {
    for (const Leaf& leaf : plan.args) out.push_back(XlasBytes(leaf));
  } else if (plan.tap) {
    if (plan.tap->linked) out.push_back(sizeof(int32_t));
  } else {
    for (const Leaf& leaf : plan.results) out.push_back(XlasBytes(leaf));
    if (plan.tells) out.push_back(kOutcomeBytes);
  }
  return Fit(in, frame->args, frame->args.args) &&
         Fit(out, frame->rets, frame->rets.rets);
}

/// Null if XLA's buffers fit the plan, else an error.
XLA_FFI_Error* Misfit(const Plan& plan, const XLA_FFI_CallFrame* frame) {
  if (FitsBuffers(plan, frame)) return nullptr;
  return MakeError(
      frame->api,
      "hostcall: the program passes other arrays to a call than its description "
      "says. It was changed after hostcall made it" HOSTCALL_CODE("hc-load"),
      XLA_FFI_Error_Code_FAILED_PRECONDITION);
}

/// Finds the plan of a place, and gives XLA a state for it.
XLA_FFI_Error* Instantiate(XLA_FFI_CallFrame* frame, XLA_FFI_TypeId* type) {
  if (!CanFail(frame)) {
    // Going on would call a function that this XLA may not have.
    std::fputs("hostcall: XLA's FFI interface has no way to report errors\n",
               stderr);
    std::abort();
  }
  if (const std::string fault = InterfaceFault(frame); !fault.empty()) {
    return MakeError(frame->api, fault, XLA_FFI_Error_Code_FAILED_PRECONDITION);
  }
  const uint64_t count = Attribute(frame, "count");
  Counted<Plan> plan =
      Slots(count >= kAcross).Find(Attribute(frame, "key"), count % kAcross);
  std::unique_ptr<PlanState> state;
  if (const XLA_FFI_ByteSpan* span = TextAttribute(frame, "text")) {
    // A program that was lowered here finds its own plan. One that was exported has
    // no name; one that was serialized elsewhere may find a plan of another call.
    const std::string_view text(span->ptr, span->len);
    if (!plan || plan->text != text) {
      plan = {};
      const bool on_cuda = type == &g_cuda_type_id;
      if (XLA_FFI_Error* e = ReadText(frame, text, on_cuda, nullptr, &plan)) {
        return e;
      }
      state = std::make_unique<PlanState>();
      state->late = std::make_unique<LateState>(text, on_cuda);
    }
  } else if (!plan) {
    return MakeError(frame->api,
                     "hostcall: this program calls a host function that this "
                     "process doesn't have. It was exported or compiled in another "
                     "process, or its function is gone: trace, compile and export "
                     "it here" HOSTCALL_CODE("hc-load"),
                     XLA_FFI_Error_Code_FAILED_PRECONDITION);
  }
  const XLA_FFI_ByteSpan* block = TextAttribute(frame, "block");
  if (block != nullptr && plan) {
    const Counted<Plan> whole = std::move(plan);
    XLA_FFI_Error* error = AskPython(
        frame, XLA_FFI_Error_Code_INTERNAL, &plan,
        [&] { return g_plan_makers.of_block(*whole, {block->ptr, block->len}); });
    if (error != nullptr) return error;
  }
  if (!state) state = StateFor(std::move(plan));
  XLA_FFI_State_Set_Args args = {
      XLA_FFI_State_Set_Args_STRUCT_SIZE, nullptr, frame->ctx,
      XLA_FFI_ExecutionStage_INSTANTIATE, type,    state.get()};
  XLA_FFI_Error* error = frame->api->XLA_FFI_State_Set(&args);
  if (error == nullptr) (void)state.release();  // XLA owns it now
  return error;
}

/// The handler around it. `type` is the type of the states that it makes.
XLA_FFI_Error* InstantiateAs(XLA_FFI_CallFrame* frame, XLA_FFI_TypeId* type,
                             uint32_t traits = 0) {
  return Guarded(
      frame, [type](XLA_FFI_CallFrame* f) { return Instantiate(f, type); }, *type,
      traits);
}

}  // namespace

PlanMakers g_plan_makers = {};

LateState::~LateState() { delete made_.load(std::memory_order_relaxed); }

XLA_FFI_Error* LateState::Get(XLA_FFI_CallFrame* frame, const PlanState** state) {
  *state = made_.load(std::memory_order_acquire);
  if (*state != nullptr) return nullptr;
  const std::vector<BufferType> buffers = TypesOf(frame);
  Counted<Plan> plan;
  if (XLA_FFI_Error* e = ReadText(frame, text_, on_cuda_, &buffers, &plan)) {
    return e;
  }
  if (XLA_FFI_Error* e = Misfit(*plan, frame)) return e;
  std::unique_ptr<PlanState> mine = StateFor(std::move(plan));
  // On failure `*state` becomes the one that another thread has published.
  if (made_.compare_exchange_strong(*state, mine.get(),
                                    std::memory_order_acq_rel)) {
    *state = mine.release();
  }
  return nullptr;
}

SlotTable<Plan>& Slots(bool across) {
  // Never destroyed: XLA may instantiate programs during static destruction.
  static auto* local = new SlotTable<Plan>;
  static auto* lasting = new SlotTable<Plan>(true);
  return across ? *lasting : *local;
}

XLA_FFI_TypeId* PlanTypeId() { return &g_type_id; }
XLA_FFI_TypeId* CudaPlanTypeId() { return &g_cuda_type_id; }

const XLA_FFI_TypeInfo* PlanTypeInfo() {
  // XLA calls the deleter on any thread, maybe without the GIL. The plan's last
  // reference then leads to the graveyard.
  static const XLA_FFI_TypeInfo info = {
      XLA_FFI_TypeInfo_STRUCT_SIZE, nullptr,
      [](void* state) { delete static_cast<PlanState*>(state); }};
  return &info;
}

XLA_FFI_Error* FindState(XLA_FFI_CallFrame* frame, const PlanState** state,
                         XLA_FFI_TypeId* type) {
  XLA_FFI_State_Get_Args get = {
      XLA_FFI_State_Get_Args_STRUCT_SIZE, nullptr, frame->ctx,
      XLA_FFI_ExecutionStage_INSTANTIATE, type,    nullptr};
  if (XLA_FFI_Error* error = frame->api->XLA_FFI_State_Get(&get)) return error;
  *state = static_cast<const PlanState*>(get.state);
  if ((*state)->late) return (*state)->late->Get(frame, state);
  return nullptr;
}

XLA_FFI_Error* StateOf(XLA_FFI_CallFrame* frame, const PlanState** state,
                       XLA_FFI_TypeId* type) {
  if (XLA_FFI_Error* error = FindState(frame, state, type)) return error;
  // Relaxed: nothing is read by it, and a place that is checked twice is right too.
  if ((*state)->fits.load(std::memory_order_relaxed)) return nullptr;
  if (XLA_FFI_Error* error = Misfit(*(*state)->plan, frame)) return error;
  (*state)->fits.store(true, std::memory_order_relaxed);
  return nullptr;
}

XLA_FFI_Error* InstantiateCall(XLA_FFI_CallFrame* frame) {
  return InstantiateAs(frame, &g_type_id);
}
XLA_FFI_Error* InstantiateOnCuda(XLA_FFI_CallFrame* frame) {
  return InstantiateAs(frame, &g_cuda_type_id);
}
XLA_FFI_Error* InstantiateInGraph(XLA_FFI_CallFrame* frame) {
  return InstantiateAs(frame, &g_cuda_type_id,
                       XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE);
}

}  // namespace hostcall
