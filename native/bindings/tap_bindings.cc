#include "bindings/tap_bindings.h"

#include <nanobind/stl/string.h>

#include <string>
#include <utility>

#include "invoke/tap_worker.h"
#include "plan/call_scope.h"
#include "plan/throttle.h"

namespace nb = nanobind;

namespace hostcall {

TapSettings ReadTapSettings(nb::object settings) {
  TapSettings tap;
  if (settings.is_none()) return tap;
  nb::tuple given = nb::cast<nb::tuple>(settings);
  tap.on = true;
  tap.when_full = static_cast<WhenFull>(nb::cast<int>(given[0]));
  tap.nested = nb::cast<bool>(given[1]);
  for (nb::handle ordinal : nb::cast<nb::tuple>(given[2])) {
    tap.only.push_back(nb::cast<int>(ordinal));
  }
  tap.through = nb::cast<bool>(given[3]);
  tap.every_steps = nb::cast<int64_t>(given[4]);
  tap.every_ns = nb::cast<int64_t>(given[5]);
  tap.sample = nb::cast<double>(given[6]);
  tap.linked = nb::cast<bool>(given[7]);
  return tap;
}

namespace {

/// The counters of a place outside of any program: one device, one run.
struct OnePlace {
  explicit OnePlace(nb::object settings) {
    const TapSettings tap = ReadTapSettings(std::move(settings));
    throttle = Throttle::For(tap.every_steps, tap.every_ns, tap.sample, 1);
  }
  bool Lets(Counters& counters) {
    if (throttle == nullptr || throttle->Lets(0, 0)) return true;
    counters.taps.skipped.fetch_add(1, std::memory_order_relaxed);
    return false;
  }
  std::unique_ptr<Throttle> throttle;
};

nb::dict QueueState() {
  const TapQueue& queue = TapQueue::Get();
  nb::dict state;
  state["pushed"] = queue.pushed();
  state["delivered"] = queue.delivered();
  state["dropped"] = queue.dropped();
  state["pending"] = queue.pending();
  state["bytes"] = queue.bytes();
  state["limit"] = queue.limit();
  state["blocked"] = queue.blocked();
  return state;
}

}  // namespace

void InitTaps(nb::module_& m) {
  m.def("interrupt_taps", &InterruptTaps);
  m.def("run_tap_worker", &RunTapWorker);
  m.def("on_tap_worker", &OnTapWorker);
  m.def(
      "stop_taps", [] { TapQueue::Get().Stop(); },
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "set_tap_limit", [](int64_t bytes) { TapQueue::Get().SetLimit(bytes); },
      nb::arg("bytes"), nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "discard_taps", [] { TapQueue::Get().Discard(); },
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "interrupt_pushes",
      [](std::string text) { TapQueue::Get().Interrupt(std::move(text)); },
      nb::arg("text"), nb::call_guard<nb::gil_scoped_release>());
  m.def("tap_mark", [] { return TapQueue::Get().Mark(); });
  m.def(
      "flush_taps",
      [](int64_t mark, double seconds) {
        return TapQueue::Get().Flush(mark, seconds);
      },
      nb::arg("mark"), nb::arg("seconds"),
      nb::call_guard<nb::gil_scoped_release>());
  m.def("tap_queue", &QueueState);
  nb::class_<OnePlace>(m, "Throttle")
      .def(nb::init<nb::object>(), nb::arg("settings"))
      .def("lets", &OnePlace::Lets, nb::arg("counters"),
           nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace hostcall
