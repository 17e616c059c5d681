#include <nanobind/stl/vector.h>

#include <cstdint>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "bindings/bindings.h"
#include "bindings/keywords.h"
#include "invoke/invoke.h"
#include "plan/call_scope.h"
#include "plan/packing.h"
#include "plan/plan.h"

namespace nb = nanobind;

namespace hostcall {
namespace {

/// A row's position as a Python tuple.
nb::tuple IndexOf(const std::vector<int64_t>& row) {
  return nb::tuple(nb::cast(row));
}

/// The int64 run of each event, then the int64 position of each, as bytes: a view
/// of them costs nanoseconds an event, where Python's integers cost 90, and few
/// functions read them.
nb::object NumbersOf(const TapEvent* event, size_t count) {
  nb::object bytes = nb::steal(PyBytes_FromStringAndSize(
      nullptr, static_cast<Py_ssize_t>(2 * count * sizeof(int64_t))));
  if (!bytes.is_valid()) nb::raise_python_error();
  char* runs = PyBytes_AS_STRING(bytes.ptr());
  char* steps = runs + count * sizeof(int64_t);
  for (size_t i = 0; i < count; ++i, event = event->next) {
    std::memcpy(runs + i * sizeof(int64_t), &event->run, sizeof(int64_t));
    std::memcpy(steps + i * sizeof(int64_t), &event->sequence, sizeof(int64_t));
  }
  return bytes;
}

/// The calling thread's innermost call: (hooks, ordinal, row, run, step, stream,
/// events, execution), or None. `events` are the runs and steps of a run of taps
/// (NumbersOf), else None. `execution` is how many executions came before in this
/// run, of a call that counts them, else None. It can't end meanwhile, since this
/// thread runs its function.
nb::object Current() {
  const ActiveCall* call = CurrentCall();
  if (call == nullptr) return nb::none();
  nb::object row = nb::none();
  if (call->row != nullptr) row = IndexOf(*call->row);
  nb::object run = nb::int_(call->run);
  nb::object step = nb::none();
  if (call->tap != nullptr) {
    run = nb::int_(call->tap->run);
    step = nb::int_(call->tap->sequence);
  }
  nb::object stream = nb::none();
  if (call->on_gpu()) stream = nb::int_(reinterpret_cast<uintptr_t>(call->stream));
  nb::object events = nb::none();
  if (call->taps != 0) events = NumbersOf(call->tap, call->taps);
  nb::object execution = nb::none();
  if (call->executions_before >= 0) execution = nb::int_(call->executions_before);
  return nb::make_tuple(nb::borrow(call->plan->hooks.get()), call->device_ordinal,
                        row, run, step, stream, events, execution);
}

/// Notes which row of the calling thread's innermost call failed. A layer that runs
/// rows together says it here, since the engine handed it all of them at once.
void NoteFailedRow(std::vector<int64_t> row) {
  ActiveCall* call = CurrentCall();
  if (call == nullptr) {
    throw std::logic_error("no call is under way on this thread");
  }
  call->failed_row = std::move(row);
}

/// All calls under way: a list of (hooks, thread, seconds, row).
nb::list Active() {
  // Everything is copied from the list before the first Python object is made. With
  // a GIL, which guards the list:
  //
  //   1. this thread:  makes a Python object, which starts the garbage collector
  //   2. collector:    runs a finalizer, which releases the GIL
  //   3. other thread: ends its call, whose ActiveCall was on its stack
  struct Snapshot {
    nb::object hooks;
    unsigned long thread;
    int64_t start;
    std::optional<std::vector<int64_t>> row;
  };
  std::vector<Snapshot> snapshots;
  ForEachCall([&snapshots](const ActiveCall& call) {
    Snapshot& snapshot = snapshots.emplace_back();
    snapshot.hooks = nb::borrow(call.plan->hooks.get());
    snapshot.thread = call.thread_id;
    snapshot.start = call.start;
    if (call.row != nullptr) snapshot.row = RowWalker::Copy(*call.row);
  });
  nb::list calls;
  const int64_t now = Ticks();
  for (const Snapshot& call : snapshots) {
    nb::object row = nb::none();
    if (call.row) row = IndexOf(*call.row);
    calls.append(nb::make_tuple(call.hooks, call.thread,
                                TicksToSeconds(now - call.start), row));
  }
  return calls;
}

/// What the calls have cost, by the names of hc.monitor.stats().
nb::dict CostsOf(const Counters& c) {
  using Part = Counters::Part;
  nb::dict costs;
  costs["calls"] = c.Sum(&Part::calls) + c.native_calls.load();
  costs["masked"] = c.masked + c.taps.masked;
  costs["dropped"] = c.taps.dropped.load();
  costs["skipped"] = c.taps.skipped.load();
  costs["errors"] = c.Sum(&Part::errors);
  costs["bytes_in"] = c.Sum(&Part::bytes_in);
  costs["bytes_out"] = c.Sum(&Part::bytes_out);
  costs["python_seconds"] = TicksToSeconds(c.Sum(&Part::python_ticks));
  costs["gil_seconds"] = TicksToSeconds(c.Sum(&Part::gil_ticks));
  costs["wait_seconds"] = TicksToSeconds(c.taps.waited.load());
  return costs;
}

}  // namespace

void InitCalls(nb::module_& m) {
  nb::class_<Counters>(m, "Counters").def(nb::init<>()).def("read", &CostsOf);
  m.def("current", &Current);
  m.def("active", &Active);
  m.def("failed_row", &NoteFailedRow, nb::arg("row"));
  m.def("only_on_threads", &OnlyOnThreads, nb::arg("threads"));
  m.def("interrupt_calls", &InterruptCalls, nb::arg("calls") = true,
        nb::arg("taps") = false);
  BindEnum<Ambient>(m, "Ambient", {"FIXED", "DEVICE", "GUARD", "WITH"});
  m.def(
      "add_ambient_setting",
      [](Ambient kind, nb::handle setting, nb::handle swap, nb::handle set,
         nb::handle get, nb::handle value, nb::handle unset) {
        // None: the value is that of the call.
        PyObject* const fixed = value.is_none() ? nullptr : value.ptr();
        AddAmbientSetting({kind, setting.ptr(), swap.ptr(), set.ptr(), get.ptr(),
                           fixed, unset.ptr()});
      },
      nb::arg("kind"), nb::arg("setting"), nb::arg("swap"), nb::arg("set"),
      nb::arg("get"), nb::arg("value").none(), nb::arg("unset"));
}

}  // namespace hostcall
