#include "bindings/plan_bindings.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/engine.h"
#include "bindings/eager_bindings.h"
#include "bindings/feed_bindings.h"
#include "bindings/keywords.h"
#include "bindings/setting_bindings.h"
#include "handlers/plan_state.h"

namespace nb = nanobind;

namespace hostcall {
namespace {

// --- Plans from Python's fields

// Typed objects, so that a field of another type is an error when a struct is made.
bool IsDtype(PyObject* object) { return PyArray_DescrCheck(object); }
bool IsCounters(PyObject* object) { return nb::isinstance<Counters>(object); }

struct Dtype : nb::object {
  NB_OBJECT_DEFAULT(Dtype, nb::object, "numpy.dtype", IsDtype)
};
struct CountersObject : nb::object {
  NB_OBJECT_DEFAULT(CountersObject, nb::object, "Counters", IsCounters)
};
using Callable = std::optional<nb::callable>;

/// The fields of a Leaf that Python gives. Its strides depend on the plan's grid.
struct LeafSpec {
  Dtype dtype;
  std::vector<int64_t> shape;
  int bits = 0;
  bool is_signed = false;
  std::vector<bool> batched;  ///< one flag for each batch axis: the buffer has it
  Callable convert;
  std::optional<nb::bytes> fill;
};

/// The fields of a Plan that Python gives (plan/plan.h says what they mean).
struct PlanSpec {
  nb::callable function;
  std::vector<LeafSpec> args, results;
  std::vector<int64_t> grid;
  std::optional<std::vector<bool>> mask;  ///< its `batched`; null: no mask
  ResultForm form = ResultForm::kTree;
  Lend lend = Lend::kCopy;
  Callable runner, out_tree, enter, leave;
  nb::object info, device;
  CountersObject counters;
  uint32_t place = 0;
  bool tells = false, elsewhere = false, sends = false;
  std::optional<TeamSettings> team;
  nb::object guard, scout;
  Inside inside = Inside::kNever;
  bool keeps_mesh = false, literals = true;
  std::optional<TapSettings> tap;
  std::optional<BufferSettings> buffers;
  std::optional<int64_t> keep;
  std::optional<FeedSpec> feed;
  std::string text;
};

Ref Own(nb::handle object) { return Ref::Borrow(object.ptr()); }
Ref OwnUnlessNone(nb::handle object) {
  return object.is_none() ? Ref() : Ref::Borrow(object.ptr());
}
template <typename T>
Ref Own(const std::optional<T>& object) {
  return object ? Ref::Borrow(object->ptr()) : Ref();
}

/// The product of sizes and `product`. The sizes of a loaded program come from a
/// file, so none is trusted: throws if one is negative, or the product is no number
/// of bytes that an array can have. A size of 0 does not hide others.
int64_t Product(const std::vector<int64_t>& sizes, int64_t product) {
  constexpr int64_t kMost = int64_t{1} << 60;
  bool empty = false;
  for (const int64_t size : sizes) {
    if (size < 0) throw nb::value_error("a size of a call is negative");
    if (size == 0) {
      empty = true;
    } else if (product > kMost / size) {
      throw nb::value_error("the sizes of a call are too large for an array");
    } else {
      product *= size;
    }
  }
  return empty ? 0 : product;
}

/// For a buffer that has only the flagged batch axes, returns how many of its rows
/// one step along each axis of the grid takes (Leaf::grid_strides).
std::vector<int64_t> GridStrides(const std::vector<int64_t>& grid,
                                 const std::vector<bool>& batched) {
  if (batched.size() != grid.size()) {
    throw nb::value_error("a leaf needs one flag per batch axis");
  }
  std::vector<int64_t> strides(grid.size(), 0);
  int64_t step = 1;
  for (size_t axis = grid.size(); axis-- > 0;) {
    if (!batched[axis]) continue;
    strides[axis] = step;
    step *= grid[axis];
  }
  return strides;
}

Leaf MakeLeaf(const std::vector<int64_t>& grid, const LeafSpec& spec) {
  Leaf leaf;
  leaf.dtype = Own(spec.dtype);
  leaf.dims.assign(spec.shape.begin(), spec.shape.end());
  leaf.bits = spec.bits;
  leaf.is_signed = spec.is_signed;
  leaf.grid_strides = GridStrides(grid, spec.batched);
  leaf.convert = Own(spec.convert);
  leaf.fill = Own(spec.fill);
  const int64_t item = PyDataType_ELSIZE(leaf.descr());
  const int64_t row_bytes = Product(spec.shape, item);
  // The engine copies a fill of this size into each masked row.
  if (spec.fill && static_cast<int64_t>(spec.fill->size()) != row_bytes) {
    throw nb::value_error("a fill should have the bytes of one row of its result");
  }
  std::vector<int64_t> rows;
  for (size_t axis = 0; axis < grid.size(); ++axis) {
    if (spec.batched[axis]) rows.push_back(grid[axis]);
  }
  Product(rows, std::max<int64_t>(row_bytes, 1));
  return leaf;
}

Counted<Plan> MakePlan(PlanSpec spec) {
  auto* plan = new Plan;
  // Counted from here on, so a plan that fails below is released like all others,
  // and goes to the graveyard.
  Counted<Plan> counted = Counted<Plan>::Adopt(plan);
  plan->function = Own(spec.function);
  plan->grid = std::move(spec.grid);
  Product(plan->grid, 1);
  if (spec.keep && *spec.keep < 0) throw nb::value_error("keep is negative");
  if (spec.team && spec.team->size < 1) throw nb::value_error("a team is empty");
  for (const LeafSpec& leaf : spec.args) {
    plan->args.push_back(MakeLeaf(plan->grid, leaf));
  }
  for (const LeafSpec& leaf : spec.results) {
    plan->results.push_back(MakeLeaf(plan->grid, leaf));
  }
  plan->masked = spec.mask.has_value();
  if (plan->masked) plan->mask_strides = GridStrides(plan->grid, *spec.mask);
  plan->form = spec.form;
  plan->lend = spec.lend;
  plan->runner = Own(spec.runner);
  plan->out_tree = Own(spec.out_tree);
  plan->info = Own(spec.info);
  // Looked up once: looking up a method takes longer than a small call.
  plan->flatten = Own(spec.info.attr("flatten"));
  plan->coerce = Own(spec.info.attr("coerce"));
  plan->on_error = Own(spec.info.attr("on_error"));
  plan->on_escape = Own(spec.info.attr("on_escape"));
  plan->on_unwritten = Own(spec.info.attr("on_unwritten"));
  plan->on_lone_failure = Own(spec.info.attr("on_lone_failure"));
  plan->on_verdict = Own(spec.info.attr("on_verdict"));
  plan->device = Own(spec.device);
  plan->enter = Own(spec.enter);
  plan->leave = Own(spec.leave);
  plan->counters_owner = Own(spec.counters);
  plan->counters = nb::cast<Counters*>(spec.counters);
  plan->counts = &plan->counters->taps;
  plan->place = spec.place;
  plan->tells = spec.tells;
  plan->elsewhere = spec.elsewhere;
  plan->sends = spec.sends;
  plan->team = spec.team;
  plan->guard = OwnUnlessNone(spec.guard);
  plan->scout = OwnUnlessNone(spec.scout);
  plan->inside = spec.inside;
  plan->keeps_mesh = spec.keeps_mesh;
  plan->literals = spec.literals;
  plan->tap = std::move(spec.tap);
  if (spec.buffers) plan->buffers = std::move(*spec.buffers);
  plan->keep = spec.keep;
  plan->text = std::move(spec.text);
  if (spec.feed) plan->feed = {spec.feed->ring.ring, std::move(spec.feed->devices)};
  plan->Seal();
  return counted;
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

Counted<Plan> MakeBlock(const Plan& whole, std::string_view block,
                        std::string* error) {
  try {
    const nb::handle info = whole.info.get();
    return nb::cast<PlanHandle&>(
               info.attr("plan_of_block")(nb::str(block.data(), block.size())))
        .plan;
  } catch (const std::exception& e) {
    *error = e.what();
    return {};
  }
}

/// Python's function that reads texts, owned. Guarded by the GIL.
PyObject* g_read_text = nullptr;

Counted<Plan> ReadText(std::string_view text, bool on_cuda,
                       const std::vector<BufferType>* buffers, std::string* error) {
  try {
    nb::object types = nb::none();
    if (buffers != nullptr) types = nb::cast(*buffers);
    const nb::object made =
        nb::handle(g_read_text)(nb::str(text.data(), text.size()), on_cuda, types);
    if (buffers != nullptr) return nb::cast<PlanHandle&>(made).plan;
  } catch (nb::python_error& e) {
    // Without the traceback, which shows hostcall's own frames only.
    // A text may have lone surrogates, which UTF-8 can't hold.
    *error = nb::cast<nb::bytes>(
                 nb::str(e.value()).attr("encode")("utf-8", "backslashreplace"))
                 .c_str();
    if (error->empty()) *error = e.what();
  } catch (const std::exception& e) {
    *error = e.what();
  }
  return {};
}

const Keywords<PlanSpec>& PlanFields() {
  static const auto* fields =
      new auto(Keywords<PlanSpec>("Plan")
                   .Field<&PlanSpec::function>("function")
                   .Field<&PlanSpec::args>("args")
                   .Field<&PlanSpec::results>("results")
                   .Field<&PlanSpec::grid>("grid")
                   .Field<&PlanSpec::mask>("mask")
                   .Field<&PlanSpec::form>("form")
                   .Field<&PlanSpec::lend>("lend")
                   .Field<&PlanSpec::runner>("runner")
                   .Field<&PlanSpec::out_tree>("out_tree")
                   .Field<&PlanSpec::info>("info")
                   .Field<&PlanSpec::device>("device")
                   .Field<&PlanSpec::enter>("enter")
                   .Field<&PlanSpec::leave>("leave")
                   .Field<&PlanSpec::counters>("counters")
                   .Field<&PlanSpec::place>("place")
                   .Field<&PlanSpec::tells>("tells")
                   .Field<&PlanSpec::elsewhere>("elsewhere")
                   .Field<&PlanSpec::sends>("sends")
                   .Field<&PlanSpec::team>("team")
                   .Field<&PlanSpec::guard>("guard")
                   .Field<&PlanSpec::scout>("scout")
                   .Field<&PlanSpec::inside>("inside")
                   .Field<&PlanSpec::keeps_mesh>("keeps_mesh")
                   .Field<&PlanSpec::literals>("literals")
                   .Field<&PlanSpec::tap>("tap")
                   .Field<&PlanSpec::buffers>("buffers")
                   .Field<&PlanSpec::keep>("keep")
                   .Field<&PlanSpec::feed>("feed")
                   .Field<&PlanSpec::text>("text"));
  return *fields;
}

}  // namespace

void InitPlans(nb::module_& m) {
  SetBlockMaker(&MakeBlock);
  SetTextReader(&ReadText);
  m.def(
      "set_text_reader",
      [](nb::callable function) {
        Py_INCREF(function.ptr());
        Py_XSETREF(g_read_text, function.ptr());
      },
      nb::arg("function"));
  PlanFields();  // made here: no thread waits for another one that makes it
  InitSettings(m);
  BindStruct(m, Keywords<LeafSpec>("Leaf")
                    .Field<&LeafSpec::dtype>("dtype")
                    .Field<&LeafSpec::shape>("shape")
                    .Field<&LeafSpec::bits>("bits")
                    .Field<&LeafSpec::is_signed>("is_signed")
                    .Field<&LeafSpec::batched>("batched")
                    .Field<&LeafSpec::convert>("convert")
                    .Field<&LeafSpec::fill>("fill"));

  nb::class_<PlanHandle> plan(m, "Plan");
  plan.def("__init__", [](PlanHandle* self, nb::kwargs given) {
    new (self) PlanHandle{MakePlan(PlanFields().Read(given))};
  });
  BindEager(plan);
  nb::class_<Slot>(m, "Slot", nb::is_weak_referenceable())
      .def(nb::init<const PlanHandle&, uint64_t, bool>(), nb::arg("plan"),
           nb::arg("key"), nb::arg("across"))
      .def_ro("count", &Slot::count);
  m.def("live_slots", [] { return Slots(false).live() + Slots(true).live(); });
}

}  // namespace hostcall
