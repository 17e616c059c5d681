#include "bindings/call_bindings.h"

#include <nanobind/stl/vector.h>

#include <cstdint>
#include <vector>

#include "plan/call_scope.h"

namespace nb = nanobind;

namespace hostcall {
namespace {

/// A row's position as a Python tuple.
nb::tuple IndexOf(const std::vector<int64_t>& row) {
  nb::list index;
  for (int64_t i : row) index.append(i);
  return nb::tuple(index);
}

/// The calling thread's innermost call: (info, ordinal, row, run, step, stream,
/// events), or None. `events` are (runs, steps) of a run of taps, else None. It
/// can't end meanwhile, since this thread runs its function.
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
  nb::object events = nb::none();
  if (call->taps != 0) {
    nb::list runs, steps;
    const TapEvent* event = call->tap;
    for (size_t i = 0; i < call->taps; ++i, event = event->next) {
      runs.append(event->run);
      steps.append(event->sequence);
    }
    events = nb::make_tuple(runs, steps);
  }
  return nb::make_tuple(nb::borrow(call->plan->info.get()), call->device_ordinal,
                        row, run, step, stream, events);
}

/// All calls under way: a list of (info, thread, seconds, row).
nb::list Active() {
  // The list of calls is guarded by the GIL. So everything is copied from it before
  // the first Python object is made:
  //
  //   1. this thread:  makes a Python object, which starts the garbage collector
  //   2. collector:    runs a finalizer, which releases the GIL
  //   3. other thread: ends its call, whose ActiveCall was on its stack
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

void AddSetting(Ambient kind, nb::object setting, nb::object swap, nb::object set,
                nb::object get, nb::object value, nb::object unset) {
  AddAmbientSetting(kind, setting.ptr(), swap.ptr(), set.ptr(), get.ptr(),
                    value.is_none() ? nullptr : value.ptr(), unset.ptr());
}

}  // namespace

void InitCalls(nb::module_& m) {
  m.def("current", &Current);
  m.def("active", &Active);
  m.def("only_on_threads", &OnlyOnThreads, nb::arg("threads"));
  m.def("interrupt_calls", &InterruptForeignCalls, nb::arg("taps") = false);
  m.def("interrupt_taps", &InterruptTaps);
  nb::enum_<Ambient>(m, "Ambient")
      .value("FIXED", Ambient::kFixed)
      .value("DEVICE", Ambient::kDevice)
      .value("GUARD", Ambient::kGuard)
      .value("WITH", Ambient::kWith);
  m.def("add_ambient_setting", &AddSetting, nb::kw_only(), nb::arg("kind"),
        nb::arg("setting"), nb::arg("swap"), nb::arg("set"), nb::arg("get"),
        nb::arg("value").none(), nb::arg("unset"));
}

}  // namespace hostcall
