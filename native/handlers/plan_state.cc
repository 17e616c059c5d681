#include "handlers/plan_state.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>

#include "base/code.h"
#include "base/engine.h"
#include "base/guards.h"
#include "handlers/ffi.h"

namespace nb = nanobind;

namespace hostcall {
namespace {

// XLA writes the ids when Python registers the types.
XLA_FFI_TypeId g_type_id = XLA_FFI_UNKNOWN_TYPE_ID;
XLA_FFI_TypeId g_cuda_type_id = XLA_FFI_UNKNOWN_TYPE_ID;

/// Python's function that reads texts, owned. Guarded by the GIL.
PyObject* g_read_text = nullptr;

/// A buffer that XLA passes: its dtype as XLA_FFI_DataType, then its dimensions.
using BufferType = std::vector<int64_t>;

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
  } catch (nb::python_error& e) {
    // Without the traceback, which shows hostcall's own frames only.
    // A text may have lone surrogates, which UTF-8 can't hold.
    const auto text = nb::cast<nb::bytes>(
        nb::str(e.value()).attr("encode")("utf-8", "backslashreplace"));
    return MakeError(frame->api, text.size() == 0 ? e.what() : text.c_str(), code);
  }
}

/// Asks Python to read a text. Returns XLA's error, or null with the plan in
/// `*plan` if there are buffers.
XLA_FFI_Error* ReadText(XLA_FFI_CallFrame* frame, const std::string& text,
                        bool on_cuda, const std::vector<BufferType>* buffers,
                        Counted<Plan>* plan) {
  return AskPython(frame, XLA_FFI_Error_Code_FAILED_PRECONDITION, plan,
                   [&]() -> Counted<Plan> {
                     nb::object types = nb::none();
                     if (buffers != nullptr) types = nb::cast(*buffers);
                     const nb::object made = nb::handle(g_read_text)(
                         nb::str(text.data(), text.size()), on_cuda, types);
                     if (buffers == nullptr) return {};
                     return nb::cast<PlanHandle&>(made).plan;
                   });
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

/// Whether the last buffers of a list have these sizes. A number or a token that
/// only orders the call may be in front of them.
bool Fit(int64_t size, void* const* items, const std::vector<size_t>& bytes) {
  const auto wanted = static_cast<int64_t>(bytes.size());
  if (size != wanted && size != wanted + 1) return false;
  for (int64_t i = 0; i < wanted; ++i) {
    const auto* buffer =
        static_cast<const XLA_FFI_Buffer*>(items[size - wanted + i]);
    if (BytesOf(*buffer) != bytes[static_cast<size_t>(i)]) return false;
  }
  return true;
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
  return Fit(frame->args.size, frame->args.args, in) &&
         Fit(frame->rets.size, frame->rets.rets, out);
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
    const std::string text(span->ptr, span->len);
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
    XLA_FFI_Error* error =
        AskPython(frame, XLA_FFI_Error_Code_INTERNAL, &plan, [&] {
          const nb::object made =
              nb::handle(whole->info.get())
                  .attr("plan_of_block")(nb::str(block->ptr, block->len));
          return nb::cast<PlanHandle&>(made).plan;
        });
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

}  // namespace

void SetTextReader(PyObject* function) {
  Py_INCREF(function);
  Py_XSETREF(g_read_text, function);
}

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

}  // namespace hostcall
