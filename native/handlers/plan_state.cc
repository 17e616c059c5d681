#include "handlers/plan_state.h"

#include <optional>
#include <string>
#include <utility>

#include "base/code.h"
#include "base/engine.h"
#include "base/guards.h"

namespace hostcall {
namespace {

/// The state of a place with this plan.
std::unique_ptr<PlanState> StateFor(RefPtr<Plan> plan) {
  auto state = std::make_unique<PlanState>();
  if (plan->team) state->team = std::make_unique<Team>(*plan->team);
  state->throttle = plan->kind->NewThrottle();
  state->plan = std::move(plan);
  return state;
}

/// Asks Python for a plan, on a thread that compiles, loads or runs a program.
/// `make_plan` returns it or throws. Throws XlaError.
template <typename MakePlan>
RefPtr<Plan> PlanFromPython(XLA_FFI_CallFrame* frame, XLA_FFI_Error_Code code,
                            MakePlan make_plan) {
  Entry entry;
  if (!entry) throw XlaError{ClosedError(frame)};
  // If the thread holds the GIL, so does the guard; no lock of XLA's is known to be
  // held here.
  GilGuard gil;
  try {
    return make_plan();
  } catch (const std::exception& error) {
    throw XlaError{MakeError(frame->api, error.what(), code)};
  }
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

/// Asks Python to read a text (PlanMakers::of_text); for a run, with the types of
/// its buffers. Throws XlaError.
RefPtr<Plan> ReadText(XLA_FFI_CallFrame* frame, std::string_view text, bool on_cuda,
                      bool runs) {
  return PlanFromPython(frame, XLA_FFI_Error_Code_FAILED_PRECONDITION, [&] {
    std::vector<BufferType> buffers;
    if (runs) buffers = TypesOf(frame);
    return g_plan_makers.of_text(text, on_cuda, runs ? &buffers : nullptr);
  });
}

/// Throws XlaError unless XLA's buffers have the sizes that a plan reads and
/// writes. They have for programs that were lowered here, and for texts, whose
/// shapes Python has compared. This compares what the engine made of them, so that
/// memory is safe whatever a file says: a program that JAX's own loaders read may
/// name any plan of this process.
void CheckFit(const Plan& plan, const XLA_FFI_CallFrame* frame) {
  if (Fit(plan.OperandBytes(&Leaf::xlas_bytes), frame->args, frame->args.args) &&
      Fit(plan.ResultBytes(&Leaf::xlas_bytes), frame->rets, frame->rets.rets)) {
    return;
  }
  std::optional<int> unknown = UnknownType(frame->args, frame->args.args);
  if (!unknown) unknown = UnknownType(frame->rets, frame->rets.rets);
  if (unknown) {
    throw XlaError{MakeError(
        frame->api,
        "hostcall: a call has an array of XLA's type " + std::to_string(*unknown) +
            ", which is newer than this hostcall. Install a hostcall that was made "
            "for this jaxlib, or convert the array before the call" HOSTCALL_CODE(
                "hc-device"),
        XLA_FFI_Error_Code_FAILED_PRECONDITION)};
  }
  throw XlaError{MakeError(
      frame->api,
      "hostcall: the program passes other arrays to a call than its description "
      "says. It was changed after hostcall made it" HOSTCALL_CODE("hc-load"),
      XLA_FFI_Error_Code_FAILED_PRECONDITION)};
}

/// The state with the plan of a text, made if there is none yet. Throws XlaError.
const PlanState& Made(const PlanState& late, XLA_FFI_CallFrame* frame) {
  const PlanState* state = late.made.load(std::memory_order_acquire);
  if (state != nullptr) return *state;
  RefPtr<Plan> plan = ReadText(frame, late.text, late.on_cuda, true);
  CheckFit(*plan, frame);
  std::unique_ptr<PlanState> own_state = StateFor(std::move(plan));
  // On failure `state` becomes the one that another thread has published, so that
  // acquires; success reads only null, and releases.
  if (late.made.compare_exchange_strong(state, own_state.get(),
                                        std::memory_order_release,
                                        std::memory_order_acquire)) {
    state = own_state.release();
  }
  return *state;
}

/// FindState, for a handler that passes the frame's buffers to a plan of the kinds
/// that `accepts` takes.
const PlanState& FittingState(XLA_FFI_CallFrame* frame,
                              bool (*accepts)(const Kind&), XLA_FFI_TypeId* type) {
  const PlanState& state = FindState(frame, type);
  // Relaxed: nothing is read by it, and a place that is checked twice is right too.
  if (!state.fits.load(std::memory_order_relaxed)) {
    CheckFit(*state.plan, frame);
    if (!accepts(*state.plan->kind)) throw std::runtime_error(kBufferMismatch);
    state.fits.store(true, std::memory_order_relaxed);
  }
  return state;
}

}  // namespace

XLA_FFI_Error* Instantiate(XLA_FFI_CallFrame* frame, XLA_FFI_TypeId* type) {
  CheckInterface(frame);
  const uint64_t count = Attribute(frame, "count");
  RefPtr<Plan> plan =
      Slots(count >= kAcross).Find(Attribute(frame, "key"), count % kAcross);
  std::unique_ptr<PlanState> state;
  if (const XLA_FFI_ByteSpan* span = TextAttribute(frame, "text")) {
    // A program that was lowered here finds its own plan. One that was exported has
    // no name; one that was serialized elsewhere may find a plan of another call.
    const std::string_view text(span->ptr, span->len);
    if (!plan || plan->text != text) {
      plan = {};
      state = std::make_unique<PlanState>();
      state->text = text;
      state->on_cuda = type == &g_cuda_plan_type;
      ReadText(frame, text, state->on_cuda, false);
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
    plan = PlanFromPython(frame, XLA_FFI_Error_Code_INTERNAL, [&] {
      return g_plan_makers.of_block(*plan, {block->ptr, block->len});
    });
  }
  if (!state) state = StateFor(std::move(plan));
  AskState(frame, frame->api->XLA_FFI_State_Set, type, state.get());
  (void)state.release();  // XLA owns it now
  return nullptr;
}

PlanMakers g_plan_makers = {};

PlanState::~PlanState() {
  // Relaxed: XLA destroys a state behind all runs of its executable.
  delete made.load(std::memory_order_relaxed);
}

SlotTable<Plan>& Slots(bool across) {
  // Never destroyed: XLA may instantiate programs during static destruction.
  static auto* local = new SlotTable<Plan>;
  static auto* lasting = new SlotTable<Plan>(true);
  return across ? *lasting : *local;
}

const XLA_FFI_TypeInfo* PlanTypeInfo() {
  // XLA calls the deleter on any thread, maybe without the GIL. The plan's last
  // reference then leads to the graveyard.
  static const XLA_FFI_TypeInfo info = {
      XLA_FFI_TypeInfo_STRUCT_SIZE, nullptr,
      [](void* state) { delete static_cast<PlanState*>(state); }};
  return &info;
}

const PlanState& FindState(XLA_FFI_CallFrame* frame, XLA_FFI_TypeId* type) {
  const void* pointer =
      AskState(frame, frame->api->XLA_FFI_State_Get, type, nullptr);
  const auto& state = *static_cast<const PlanState*>(pointer);
  return state.plan ? state : Made(state, frame);
}

Work::Work(XLA_FFI_CallFrame* f, bool (*accepts)(const Kind&), XLA_FFI_TypeId* type)
    : frame(f),
      state(FittingState(f, accepts, type)),
      plan(*state.plan),
      operands(f->args, f->args.args, plan.operand_bytes.size()),
      results(f->rets, f->rets.rets, plan.result_bytes.size()) {}

}  // namespace hostcall
