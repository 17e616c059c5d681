// The only NB_MODULE: what Python sees of the engine.

#define HOSTCALL_IMPORT_NUMPY
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "base/engine.h"
#include "base/report.h"
#include "base/signals.h"
#include "bindings/handler_bindings.h"
#include "bindings/tap_bindings.h"
#include "buffer/buffer_call.h"
#include "buffer/buffer_object.h"
#include "handlers/cpu_handlers.h"
#include "invoke/invoke.h"
#include "invoke/tap_worker.h"
#include "plan/plan.h"

namespace nb = nanobind;

namespace hostcall {
namespace {

Ref Own(nb::handle object) { return Ref::Borrow(object.ptr()); }
Ref OwnOrNull(nb::handle object) {
  return object.is_none() ? Ref() : Ref::Borrow(object.ptr());
}

/// Rows to step along each batch axis of a buffer that has only the flagged ones.
std::vector<int64_t> GridStrides(const std::vector<int64_t>& grid,
                                 const std::vector<bool>& batched) {
  if (batched.size() != grid.size()) {
    throw nb::value_error("a leaf needs one flag a batch axis");
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

/// (dtype, shape, bits, signed, batched, extra)
Leaf MakeLeaf(const std::vector<int64_t>& grid, nb::tuple spec, bool is_result) {
  Leaf leaf;
  if (!PyArray_DescrCheck(spec[0].ptr())) {
    throw nb::type_error("a leaf needs a NumPy dtype");
  }
  leaf.dtype = Own(spec[0]);
  for (int64_t dim : nb::cast<std::vector<int64_t>>(spec[1])) {
    leaf.dims.push_back(static_cast<npy_intp>(dim));
  }
  leaf.bits = nb::cast<int>(spec[2]);
  leaf.is_signed = nb::cast<bool>(spec[3]);
  leaf.grid_strides = GridStrides(grid, nb::cast<std::vector<bool>>(spec[4]));
  (is_result ? leaf.fill : leaf.convert) = OwnOrNull(spec[5]);
  return leaf;
}

/// A plan as Python holds it.
struct PlanHandle {
  Counted<Plan> plan;
};

/// Keeps a plan under its number for as long as it lives. An executable holds it.
struct Slot {
  Slot(const PlanHandle& handle, bool across)
      : number(Slots(across).Add(handle.plan) + (across ? kAcross : 0)) {}
  ~Slot() {
    // In a forked child the table may be locked by a thread that isn't there.
    if (Engine::Get().forked()) return;
    Slots(number >= kAcross).Remove(number % kAcross);
  }
  Slot(const Slot&) = delete;
  Slot& operator=(const Slot&) = delete;
  uint64_t number;
};

PlanHandle MakePlan(nb::object function, nb::list args, nb::list results,
                    std::vector<int64_t> grid, nb::object mask, int form, int lend,
                    nb::object runner, nb::object hooks, nb::object out_tree,
                    nb::object info, nb::object device, nb::object counters,
                    uint64_t signature, bool tells, bool elsewhere, bool sends,
                    int team_mode, int team_size, int team_leader, nb::object guard,
                    nb::object scout, int inside, bool keeps_mesh, bool literals,
                    nb::object tap, nb::object buffers) {
  auto* plan = new Plan;
  PlanHandle handle{Counted<Plan>::Adopt(plan)};
  plan->function = Own(function);
  plan->grid = std::move(grid);
  for (nb::handle spec : args) {
    plan->args.push_back(MakeLeaf(plan->grid, nb::cast<nb::tuple>(spec), false));
  }
  for (nb::handle spec : results) {
    plan->results.push_back(MakeLeaf(plan->grid, nb::cast<nb::tuple>(spec), true));
  }
  plan->masked = !mask.is_none();
  if (plan->masked) {
    plan->mask_strides = GridStrides(plan->grid, nb::cast<std::vector<bool>>(mask));
  }
  plan->form = static_cast<ResultForm>(form);
  plan->lend = static_cast<Lend>(lend);
  plan->runner = OwnOrNull(runner);
  plan->flatten = Own(hooks.attr("flatten"));
  plan->coerce = Own(hooks.attr("coerce"));
  plan->on_error = Own(hooks.attr("on_error"));
  plan->on_escape = Own(hooks.attr("on_escape"));
  plan->on_unwritten = Own(hooks.attr("on_unwritten"));
  plan->on_lone_failure = Own(hooks.attr("on_lone_failure"));
  plan->on_failure_elsewhere = Own(hooks.attr("on_failure_elsewhere"));
  plan->out_tree = OwnOrNull(out_tree);
  plan->info = Own(info);
  plan->device = Own(device);
  plan->counters_owner = Own(counters);
  plan->counters = nb::cast<Counters*>(counters);
  plan->counts = &plan->counters->taps;
  plan->signature = signature;
  plan->tells = tells;
  plan->elsewhere = elsewhere;
  plan->sends = sends;
  plan->team_mode = static_cast<TeamMode>(team_mode);
  plan->team_size = team_size;
  plan->team_leader = team_leader;
  plan->guard = OwnOrNull(guard);
  plan->scout = OwnOrNull(scout);
  plan->inside = static_cast<Inside>(inside);
  plan->keeps_mesh = keeps_mesh;
  plan->literals = literals;
  plan->tap = ReadTapSettings(tap);
  if (!buffers.is_none()) {  // (aliases, debug, address, status)
    plan->buffers.aliases = nb::cast<std::vector<int>>(buffers[0]);
    plan->buffers.debug = nb::cast<bool>(buffers[1]);
    plan->buffers.address = nb::cast<uintptr_t>(buffers[2]);
    plan->buffers.status = nb::cast<bool>(buffers[3]);
  }
  plan->Seal();
  return handle;
}

std::vector<const void*> Buffers(const Plan& plan, nb::list operands) {
  if (operands.size() != plan.operands()) {
    throw nb::value_error("another number of operands than the plan has");
  }
  std::vector<const void*> in;
  const size_t first = plan.masked ? 1 : 0;
  for (nb::handle operand : operands) {
    auto* array = reinterpret_cast<PyArrayObject*>(operand.ptr());
    if (!PyArray_Check(operand.ptr()) || !PyArray_IS_C_CONTIGUOUS(array)) {
      throw nb::type_error("operands are row-major arrays");
    }
    const size_t bytes = in.size() < first
                             ? static_cast<size_t>(plan.mask_rows)
                             : plan.args[in.size() - first].buffer_bytes();
    if (static_cast<size_t>(PyArray_NBYTES(array)) != bytes) {
      throw nb::value_error("an operand of another size than the plan's");
    }
    in.push_back(PyArray_DATA(array));
  }
  return in;
}

/// Queues a tap of arrays of the host. False: it was dropped.
bool PushEagerly(const PlanHandle& handle, nb::list operands) {
  const Plan& plan = *handle.plan;
  const std::vector<const void*> in = Buffers(plan, operands);
  Entry entry;
  if (!entry) throw std::runtime_error("hostcall: the engine is closed");
  for (;;) {
    try {
      GilRelease unlocked;  // it may wait for the worker
      return PushTap(plan, -1, -1, in.data());
    } catch (const PushInterrupted&) {
      // Meant for the main thread, which has the signal itself; others go on
      // waiting.
      if (PyErr_CheckSignals() != 0) throw nb::python_error();
    }
  }
}

/// Runs a plan on arrays of the host, without a compiled program.
nb::list InvokeEagerly(const PlanHandle& handle, nb::list operands) {
  const Plan& plan = *handle.plan;
  std::vector<const void*> in = Buffers(plan, operands);
  nb::list out;
  std::vector<void*> targets;
  for (const Leaf& leaf : plan.results) {
    std::vector<npy_intp> dims(plan.grid.begin(), plan.grid.end());
    dims.insert(dims.end(), leaf.dims.begin(), leaf.dims.end());
    Py_INCREF(leaf.dtype.get());
    PyObject* array =
        PyArray_Empty(static_cast<int>(dims.size()), dims.data(), leaf.descr(), 0);
    if (array == nullptr) throw nb::python_error();
    void* data = PyArray_DATA(reinterpret_cast<PyArrayObject*>(array));
    if (plan.buffers.Aliases(targets.size())) {
      const int arg = plan.buffers.aliases[targets.size()];
      std::memcpy(data, in[arg], plan.args[arg].buffer_bytes());
      in[arg] = data;
    }
    targets.push_back(data);
    out.append(nb::steal(array));
  }
  if (plan.buffers.address != 0) {
    NativeStatus status;
    {
      nb::gil_scoped_release unlocked;
      status = RunNative(plan, in.data(), targets.data(), nullptr);
    }
    if (status.ok()) return out;
    RaiseStatus(plan, status);
    throw nb::python_error();
  }
  if (FilledForMask(plan, in.data(), targets.data())) return out;
  const int64_t start = Ticks();
  bool ok;
  {
    CallScope scope(plan, -1, -1);
    scope.call().start = start;
    ok = Invoke(plan, scope.call(), in.data(), targets.data());
    if (!ok) ++plan.counters->errors;
    if (Engine::Get().IsLeftBehind()) {  // what follows is JAX's C++
      GilRelease unlocked;
      StayForEver();
    }
  }
  plan.counters->python_ticks += Ticks() - start;
  if (!ok) throw nb::python_error();
  return out;
}

int WaitSignal(double seconds) {
  GilRelease unlocked;
  return Signals::Wait(seconds);
}

nb::tuple IndexOf(const std::vector<int64_t>& row) {
  nb::list index;
  for (int64_t i : row) index.append(i);
  return nb::tuple(index);
}

nb::object Current() {
  const ActiveCall* call = CurrentCall();
  if (call == nullptr) return nb::none();
  nb::object row = nb::none();
  if (call->row != nullptr) row = IndexOf(*call->row);
  nb::object run = nb::none(), step = nb::none();
  if (call->plan->lend == Lend::kBuffers) run = nb::int_(call->run);
  if (call->tap != nullptr) {
    run = nb::int_(call->tap->run);
    step = nb::int_(call->tap->sequence);
  }
  nb::object stream = nb::none();
  if (call->on_gpu()) stream = nb::int_(reinterpret_cast<uintptr_t>(call->stream));
  return nb::make_tuple(nb::borrow(call->plan->info.get()), call->device_ordinal,
                        row, run, step, stream);
}

nb::list Active() {
  // Making a Python object may let another thread run, and the list change.
  struct Seen {
    nb::object info;
    unsigned long thread;
    int64_t start;
    bool batched;
    std::vector<int64_t> row;
  };
  std::vector<Seen> seen;
  for (const ActiveCall* call = AllCalls(); call != nullptr; call = call->next) {
    const bool batched = call->row != nullptr;
    seen.push_back({nb::borrow(call->plan->info.get()), call->thread_id,
                    call->start, batched,
                    batched ? *call->row : std::vector<int64_t>()});
  }
  nb::list calls;
  const int64_t now = Ticks();
  for (const Seen& call : seen) {
    nb::object row = nb::none();
    if (call.batched) row = IndexOf(call.row);
    calls.append(nb::make_tuple(call.info, call.thread,
                                TicksToSeconds(now - call.start), row));
  }
  return calls;
}

bool ImportNumpy() {
  import_array1(false);
  return true;
}

}  // namespace

NB_MODULE(_native, m) {
  if (!ImportNumpy()) throw nb::python_error();
  m.attr("__doc__") = "The engine of hostcall (see native/ in its repository).";
  // What a program held goes with the program, not with the next call of
  // somebody's.
  Graveyard::Get().AskBy([] { Signals::Post(Signals::kBury); });
  // Plans live as long as programs do, and programs can outlive the module.
  nb::set_leak_warnings(false);

  nb::class_<Counters>(m, "Counters")
      .def(nb::init<>())
      .def_prop_ro(
          "calls",
          [](const Counters& c) { return c.calls + c.native_calls.load(); })
      .def_prop_ro("masked",
                   [](const Counters& c) { return c.masked + c.taps.masked; })
      .def_prop_ro("dropped",
                   [](const Counters& c) { return c.taps.dropped.load(); })
      .def_prop_ro("skipped",
                   [](const Counters& c) { return c.taps.skipped.load(); })
      .def_ro("errors", &Counters::errors)
      .def_ro("bytes_in", &Counters::bytes_in)
      .def_ro("bytes_out", &Counters::bytes_out)
      .def_prop_ro("python_seconds",
                   [](const Counters& c) { return TicksToSeconds(c.python_ticks); })
      .def_prop_ro("gil_seconds",
                   [](const Counters& c) { return TicksToSeconds(c.gil_ticks); });

  nb::class_<PlanHandle>(m, "Plan")
      .def("invoke", &InvokeEagerly, nb::arg("operands"))
      .def("push", &PushEagerly, nb::arg("operands"));
  m.def("make_plan", &MakePlan, nb::arg("function"), nb::arg("args"),
        nb::arg("results"), nb::arg("grid"), nb::arg("mask").none(),
        nb::arg("form"), nb::arg("lend"), nb::arg("runner").none(),
        nb::arg("hooks"), nb::arg("out_tree").none(), nb::arg("info"),
        nb::arg("device"), nb::arg("counters"), nb::arg("signature"),
        nb::arg("tells"), nb::arg("elsewhere"), nb::arg("sends"),
        nb::arg("team_mode"), nb::arg("team_size"), nb::arg("team_leader"),
        nb::arg("guard").none(), nb::arg("scout").none(), nb::arg("inside"),
        nb::arg("keeps_mesh"), nb::arg("literals"), nb::arg("tap").none(),
        nb::arg("buffers").none());

  nb::class_<Slot>(m, "Slot", nb::is_weak_referenceable())
      .def(nb::init<const PlanHandle&, bool>(), nb::arg("plan"), nb::arg("across"))
      .def_ro("number", &Slot::number);

  InitHandlers(m);
  m.def("current", &Current);
  m.def("active", &Active);
  m.def("live_slots", [] { return Slots(false).live() + Slots(true).live(); });
  m.def("bury", [] { Graveyard::Get().Bury(); });
  m.def("in_flight", [] { return Engine::Get().in_flight(); });
  m.def("closed", [] { return Engine::Get().closed(); });
  m.def("close", [] { Engine::Get().Close(); });
  m.def(
      "wait_idle", [](double seconds) { return Engine::Get().WaitIdle(seconds); },
      nb::arg("seconds"), nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "set_report_converter", [](nb::object f) { SetReportConverter(f.ptr()); },
      nb::arg("convert"));
  m.def("forked", [] { return Engine::Get().forked(); });
  m.def("only_on_threads", &OnlyOnThreads, nb::arg("threads"));
  m.def("leave_behind", [] { Engine::Get().LeaveBehind(); });
  m.def("watch_sigint", &Signals::WatchInterrupt);
  m.def("watch_sigterm", &Signals::WatchTerminate);
  m.def("wait_signal", &WaitSignal, nb::arg("seconds"));
  m.def("post_signal", &Signals::Post, nb::arg("event"));
  m.def("interrupt_calls", &InterruptForeignCalls, nb::arg("taps") = false);
  InitTaps(m);
  if (!InitBuffers(m.ptr())) throw nb::python_error();
  m.def(
      "set_buffer_names",
      [](nb::object stage, nb::object ended, nb::object stream) {
        SetBufferNames(stage.ptr(), ended.ptr(), stream.ptr());
      },
      nb::arg("stage"), nb::arg("ended_error"), nb::arg("stream_error"));
  m.def(
      "keep_for_ever", [](nb::object thing) { thing.release(); }, nb::arg("thing"));
  m.def("after_fork", [] {
    Engine::Get().CloseAfterFork();
    ForgetCallsAfterFork();
  });
  m.def(
      "add_ambient_setting",
      [](int kind, nb::object self, nb::object swap, nb::object set, nb::object get,
         nb::object value, nb::object unset) {
        AddAmbientSetting(static_cast<Ambient>(kind), self.ptr(), swap.ptr(),
                          set.ptr(), get.ptr(),
                          value.is_none() ? nullptr : value.ptr(), unset.ptr());
      },
      nb::arg("kind"), nb::arg("self"), nb::arg("swap"), nb::arg("set"),
      nb::arg("get"), nb::arg("value").none(), nb::arg("unset"));
  m.def(
      "set_raw_function", [](nb::object f) { SetRawFunction(f.ptr()); },
      nb::arg("function"));
}

}  // namespace hostcall
