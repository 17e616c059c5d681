#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <utility>
#include <vector>

#include "base/engine.h"
#include "base/team.h"
#include "bindings/bindings.h"
#include "bindings/keywords.h"
#include "handlers/plan_state.h"
#include "plan/plan.h"

namespace nb = nanobind;

namespace hostcall {
namespace {

bool IsAny(PyObject*) { return true; }
bool IsBytes(PyObject* object) { return PyBytes_Check(object); }
bool IsCounters(PyObject* object) { return nb::isinstance<Counters>(object); }
bool IsDtype(PyObject* object) { return PyArray_DescrCheck(object); }

Counted<Plan> MakePlan(PlanFields fields) {
  fields.counters = nb::cast<Counters*>(nb::handle(fields.counters_owner.get()));
  auto plan = Counted<Plan>::Adopt(new Plan(std::move(fields)));
  const nb::handle info = plan->info.get();
  plan->flatten = Ref::Steal(nb::object(info.attr("flatten")).release().ptr());
  plan->coerce = Ref::Steal(nb::object(info.attr("coerce")).release().ptr());
  return plan;
}

/// Keeps a plan in the table of slots for as long as this object lives. The
/// executable holds it.
struct Slot {
  Slot(const PlanHandle& handle, uint64_t its_key, bool across)
      : key(its_key),
        count(Slots(across).Add(key, handle.plan) + (across ? kAcross : 0)) {}
  ~Slot() {
    // In a forked child, a thread of the parent may have locked the table, and
    // would never unlock it.
    if (Engine::Get().forked()) return;
    Slots(count >= kAcross).Remove(key, count % kAcross);
  }
  Slot(const Slot&) = delete;
  Slot& operator=(const Slot&) = delete;
  const uint64_t key, count;
};

/// The settings of a plan: enums and small structs.
void InitSettings(nb::module_& m) {
  BindEnum<Lend>(m, "Lend", {"COPY", "ARGS", "OUT", "BUFFERS"});
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
  BindStruct(m, Keywords<BufferSettings>("BufferSettings")
                    .Field<&BufferSettings::aliases>("aliases")
                    .Field<&BufferSettings::debug>("debug")
                    .Field<&BufferSettings::address>("address")
                    .Field<&BufferSettings::status>("status"));
}

}  // namespace

void InitPlans(nb::module_& m) {
  InitSettings(m);
  // Never deleted: the class lives as long as the interpreter.
  static const auto* fields = new auto(
      Keywords<PlanFields>("Plan")
          .Object<&PlanFields::function, PyCallable_Check>("function")
          .Field<&PlanFields::args>("args")
          .Field<&PlanFields::results>("results")
          .Field<&PlanFields::grid>("grid")
          .Field<&PlanFields::mask>("mask")
          .Field<&PlanFields::form>("form")
          .Field<&PlanFields::lend>("lend")
          .Object<&PlanFields::runner, PyCallable_Check>("runner", kOrNone)
          .Object<&PlanFields::out_tree, PyCallable_Check>("out_tree", kOrNone)
          .Object<&PlanFields::info, IsAny>("info")
          .Object<&PlanFields::device, IsAny>("device")
          .Object<&PlanFields::enter, PyCallable_Check>("enter", kOrNone)
          .Object<&PlanFields::leave, PyCallable_Check>("leave", kOrNone)
          .Object<&PlanFields::counters_owner, IsCounters>("counters")
          .Field<&PlanFields::place>("place")
          .Field<&PlanFields::tells>("tells")
          .Field<&PlanFields::elsewhere>("elsewhere")
          .Field<&PlanFields::sends>("sends")
          .Field<&PlanFields::team>("team")
          .Object<&PlanFields::guard, IsAny>("guard", kOrNone)
          .Object<&PlanFields::scout, IsAny>("scout", kOrNone)
          .Field<&PlanFields::inside>("inside")
          .Field<&PlanFields::keeps_mesh>("keeps_mesh")
          .Field<&PlanFields::literals>("literals")
          .Field<&PlanFields::tap>("tap")
          .Field<&PlanFields::buffers>("buffers", kOrNone)
          .Field<&PlanFields::keep>("keep")
          .Field<&PlanFields::feed>("feed")
          .Field<&PlanFields::text>("text"));
  nb::class_<PlanHandle> plan(m, "Plan");
  plan.def("__init__", [](PlanHandle* self, nb::kwargs given) {
    new (self) PlanHandle{MakePlan(fields->Read(given))};
  });
  InitEager(plan);
  nb::class_<Slot>(m, "Slot", nb::is_weak_referenceable())
      .def(nb::init<const PlanHandle&, uint64_t, bool>(), nb::arg("plan"),
           nb::arg("key"), nb::arg("across"))
      .def_ro("count", &Slot::count);
  m.def("live_slots", [] { return Slots(false).live() + Slots(true).live(); });
}

}  // namespace hostcall
