#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <stdexcept>
#include <string_view>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/engine.h"
#include "base/flight.h"
#include "base/no_copy.h"
#include "bindings/bindings.h"
#include "bindings/keywords.h"
#include "handlers/plan_state.h"
#include "invoke/invoke.h"
#include "invoke/taps.h"
#include "plan/arrays.h"
#include "plan/kind.h"

namespace nb = nanobind;

namespace hostcall {
namespace {

bool IsAny(PyObject*) { return true; }
bool IsBytes(PyObject* object) { return PyBytes_Check(object); }
bool IsCounters(PyObject* object) { return nb::isinstance<Counters>(object); }
bool IsDtype(PyObject* object) { return PyArray_DescrCheck(object); }

/// A plan of its fields, with the two methods of its hooks that results need.
PlanHandle MakePlan(PlanFields fields) {
  fields.counters = nb::cast<Counters*>(nb::handle(fields.counters_owner.get()));
  auto plan = RefPtr<Plan>::Adopt(new Plan(std::move(fields)));
  const nb::handle hooks = plan->hooks.get();
  plan->flatten = Ref::Steal(nb::object(hooks.attr("flatten")).release().ptr());
  plan->coerce = Ref::Steal(nb::object(hooks.attr("coerce")).release().ptr());
  return {plan};
}

/// Asks Python for the plan of one block of `whole`'s values. Throws.
RefPtr<Plan> PlanOfBlock(const Plan& whole, std::string_view block) {
  if (!whole.plan_of_block) throw std::runtime_error("its plan has no blocks");
  const nb::object plan =
      nb::handle(whole.plan_of_block.get())(nb::str(block.data(), block.size()));
  return nb::cast<PlanHandle&>(plan).plan;
}

/// Lets Python check the text of a call, and make its plan if XLA's `buffers` are
/// known. Throws what it says is wrong.
RefPtr<Plan> PlanOfText(std::string_view text, bool on_cuda,
                        const std::vector<BufferType>* buffers) try {
  nb::object types = nb::none();
  if (buffers != nullptr) types = nb::cast(*buffers);
  const nb::object plan = nb::handle(HookOf(Hook::kTextReader))(
      nb::str(text.data(), text.size()), on_cuda, types);
  if (buffers == nullptr) return {};
  return nb::cast<PlanHandle&>(plan).plan;
} catch (nb::python_error& e) {
  // Without the traceback, which shows hostcall's own frames only. A text may have
  // lone surrogates, which UTF-8 can't hold.
  const auto message = nb::cast<nb::bytes>(
      nb::str(e.value()).attr("encode")("utf-8", "backslashreplace"));
  throw std::runtime_error(message.size() == 0 ? e.what() : message.c_str());
}

/// The addresses of the operands' memory. Throws if they don't fit the plan.
std::vector<const void*> Buffers(const Plan& plan, nb::list operands) {
  // An eager tap has no flag `always`.
  return DataOf(operands, plan.MaskAndArgumentBytes());
}

/// The same plan with another function. All else that it says must hold of that.
PlanHandle WithFunction(const Plan& plan, nb::handle function) {
  if (!PyCallable_Check(function.ptr())) throw nb::type_error("not a function");
  PlanFields fields = plan;
  fields.function = Ref::Borrow(function.ptr());
  fields.prototype = plan.kind.get();  // which the new plan copies
  auto copy = RefPtr<Plan>::Adopt(new Plan(std::move(fields)));
  copy->flatten = plan.flatten;
  copy->coerce = plan.coerce;
  return {copy};
}

/// Queues a tap of arrays on the host. Returns false if it was dropped.
///
/// With a function it is a tap of that one, by a copy of the plan: all taps of one
/// line share a plan, which keeps no function alive. The queue alone then holds the
/// copy, and with it the function.
bool PushEagerly(const PlanHandle& handle, nb::list operands, nb::object function) {
  if (!Is<TapKind>(*handle.plan->kind)) throw nb::type_error("not a plan of a tap");
  const PlanHandle own = function.is_none() ? PlanHandle{handle.plan}
                                            : WithFunction(*handle.plan, function);
  const Plan& plan = *own.plan;
  const std::vector<const void*> in = Buffers(plan, operands);
  Entry entry;
  if (!entry) throw std::runtime_error(ClosedText());
  for (;;) {
    try {
      GilRelease unlocked;  // it may wait for the worker, which needs the GIL
      return PushTap(plan, -1, -1, in.data());
    } catch (const PushInterrupted&) {
      // GilRelease has ended with its block, so the GIL is held here. Python's
      // handler raises the interrupt on the main thread; other threads go on
      // waiting.
      if (PyErr_CheckSignals() != 0) throw nb::python_error();
    }
  }
}

/// The addresses of new arrays for the results, which are added to `out`. A result
/// that shares its memory with an argument takes that one's place in `in`, so that
/// the caller's array stays unchanged.
std::vector<void*> NewResults(const Plan& plan, std::vector<const void*>& in,
                              nb::list& out) {
  const Kind& kind = *plan.kind;
  std::vector<void*> targets;
  for (const Leaf& leaf : plan.results) {
    const nb::object array = nb::steal(ArrayOfRows(leaf, plan.grid).release());
    if (!array.is_valid()) throw nb::python_error();
    void* data = PyArray_DATA(reinterpret_cast<PyArrayObject*>(array.ptr()));
    const size_t number = targets.size();
    if (kind.Aliases(number)) {
      const int arg = kind.aliases[number];
      CopyBytes(data, in[arg], plan.args[arg].buffer_bytes());
      in[arg] = data;
    }
    targets.push_back(data);
    out.append(array);
  }
  return targets;
}

/// Runs a plan on arrays of the host, without a compiled program. Returns a list of
/// new arrays.
///
/// The steps are those of a handler (handlers/run_call.cc): the mask, what the kind
/// does without Python, and the call, which is counted and recorded.
nb::list InvokeEagerly(const PlanHandle& handle, nb::list operands) {
  const Plan& plan = *handle.plan;
  const Kind& kind = *plan.kind;
  std::vector<const void*> in = Buffers(plan, operands);
  nb::list out;
  std::vector<void*> targets = NewResults(plan, in, out);
  const Execution execution{plan, -1, -1, in.data(), targets.data()};
  int64_t executions_before = -1;
  {
    GilRelease unlocked(plan.counted);  // Count takes a lock
    if (Masked(execution, &executions_before)) return out;
  }
  std::unique_ptr<Progress> progress;
  if (kind.has_native_part) {
    GilRelease unlocked;
    if (kind.RunNative(execution, &progress)) return out;
  }
  const int64_t start = Ticks();
  Flight flight(plan.NewEvent(kind.event(), -1, -1, start));
  flight.Entered(start);
  bool ok;
  {
    ActiveCall active(execution, start);
    active.executions_before = executions_before;
    const CallScope scope(active);
    ok = Invoke(execution, active, progress.get());
    StayIfLeftBehind();
  }
  Counters::Part& counters = plan.counters->mine();
  if (!ok) counters.errors.Add(1);
  const int64_t end = Ticks();
  counters.python_ticks.Add(end - start);
  flight.Ended(end, ok);
  {
    GilRelease unlocked(kind.has_native_part);  // a feed's takes the ring's lock
    progress.reset();
  }
  if (!ok) throw nb::python_error();
  return out;
}

/// Keeps a plan in the table of slots for as long as this object lives. The
/// executable holds it.
struct Slot : NoCopy {
  Slot(const PlanHandle& handle, uint64_t its_key, bool across)
      : key(its_key),
        count(Slots(across).Add(key, handle.plan) + (across ? kAcross : 0)),
        plan(handle.plan.get()) {}
  ~Slot() {
    // In a forked child, a thread of the parent may have locked the table, and
    // would never unlock it.
    if (Engine::Get().forked()) return;
    Slots(count >= kAcross).Remove(key, count % kAcross);
  }
  const uint64_t key, count;
  const Plan* const plan;  ///< alive as long as this
};

/// The settings of a plan: enums and small structs.
void InitSettings(nb::module_& m) {
  BindEnum<ResultForm>(m, "ResultForm",
                       {"LEAF", "TUPLE", "NOTHING", "TREE", "IGNORED"});
  BindEnum<Inside>(m, "Inside", {"NEVER", "ASKED", "XLAS_THREADS", "EVERYWHERE"});
  BindEnum<TeamMode>(m, "TeamMode", {"ONCE", "EACH"});
  BindStruct(m, Keywords<Leaf>("Leaf")
                    .Object<&Leaf::dtype, IsDtype>("dtype")
                    .Field<&Leaf::dims>("shape")
                    .Field<&Leaf::bits>("bits")
                    .Field<&Leaf::is_signed>("is_signed")
                    .Field<&Leaf::batched>("batched")
                    .Object<&Leaf::convert, PyCallable_Check>("convert", kOrNone)
                    .Object<&Leaf::fill, IsBytes>("fill", kOrNone));
  BindStruct(m, Keywords<TeamSettings>("TeamSettings")
                    .Field<&TeamSettings::mode>("mode")
                    .Field<&TeamSettings::size>("size")
                    .Field<&TeamSettings::leader>("leader"));
}

}  // namespace

void InitPlans(nb::module_& m) {
  InitSettings(m);
  g_plan_makers = {&PlanOfBlock, &PlanOfText};
  BindMade(
      m,
      Keywords<PlanFields>("Plan")
          .Object<&PlanFields::function, PyCallable_Check>("function")
          .Field<&PlanFields::args>("args")
          .Field<&PlanFields::results>("results")
          .Field<&PlanFields::grid>("grid")
          .Field<&PlanFields::mask>("mask")
          .Field<&PlanFields::form>("form")
          .Field<&PlanFields::prototype>("kind")
          .Object<&PlanFields::runner, PyCallable_Check>("runner", kOrNone)
          .Object<&PlanFields::out_tree, PyCallable_Check>("out_tree", kOrNone)
          .Object<&PlanFields::hooks, IsAny>("hooks")
          .Object<&PlanFields::plan_of_block, PyCallable_Check>("plan_of_block",
                                                                kOrNone)
          .Object<&PlanFields::device, IsAny>("device")
          .Object<&PlanFields::enter, PyCallable_Check>("enter", kOrNone)
          .Object<&PlanFields::leave, PyCallable_Check>("leave", kOrNone)
          .Object<&PlanFields::counters_owner, IsCounters>("counters")
          .Field<&PlanFields::place>("place")
          .Field<&PlanFields::returns_outcome>("returns_outcome")
          .Field<&PlanFields::called_by_other_process>("called_by_other_process")
          .Field<&PlanFields::sends>("sends")
          .Field<&PlanFields::team>("team")
          .Object<&PlanFields::guard, IsAny>("guard", kOrNone)
          .Field<&PlanFields::inside>("inside")
          .Field<&PlanFields::keeps_mesh>("keeps_mesh")
          .Field<&PlanFields::literals>("literals")
          .Field<&PlanFields::counted>("counted")
          .Field<&PlanFields::text>("text"),
      &MakePlan)
      .def("invoke", &InvokeEagerly, nb::arg("operands"))
      .def("push", &PushEagerly, nb::arg("operands"),
           nb::arg("function").none() = nb::none());
  nb::class_<Slot>(m, "Slot", nb::is_weak_referenceable())
      .def(nb::init<const PlanHandle&, uint64_t, bool>(), nb::arg("plan"),
           nb::arg("key"), nb::arg("across"))
      .def_ro("count", &Slot::count)
      .def_prop_ro("plan", [](const Slot& slot) {
        const void* const plan = slot.plan;
        return nb::bytes(&plan, sizeof plan);
      });
  m.def("live_slots", [] { return Slots(false).live() + Slots(true).live(); });
}

}  // namespace hostcall
