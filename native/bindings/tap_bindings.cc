#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <utility>

#include "bindings/bindings.h"
#include "bindings/keywords.h"
#include "cuda/streams.h"
#include "invoke/tap_worker.h"
#include "plan/plan.h"
#include "plan/throttle.h"
#include "queue/tap_queue.h"

namespace nb = nanobind;

namespace hostcall {

namespace {

/// The throttle of a tap outside of any program: it counts one device and one run.
struct OnePlace {
  explicit OnePlace(const TapSettings& tap)
      : throttle(Throttle::For(tap.every_steps, tap.every_ns, tap.sample, 1)) {}
  /// Whether this execution goes through; counts it if not. `always` is the tap's
  /// flag. Needs no GIL.
  bool Lets(Counters& counters, bool always) {
    if (throttle == nullptr || throttle->Lets(0, 0) || always) return true;
    counters.taps.skipped.fetch_add(1, std::memory_order_relaxed);
    return false;
  }
  std::unique_ptr<Throttle> throttle;  ///< null: every tap goes through
};

/// The statistics of the tap queue.
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
  BindEnum<WhenFull>(m, "WhenFull", {"BLOCK", "DROP_NEWEST", "DROP_OLDEST"});
  BindStruct(m, Keywords<TapSettings>("TapSettings")
                    .Field<&TapSettings::when_full>("when_full")
                    .Field<&TapSettings::nested>("nested")
                    .Field<&TapSettings::only>("only")
                    .Field<&TapSettings::linked>("linked")
                    .Field<&TapSettings::through>("through")
                    .Field<&TapSettings::every_steps>("every_steps")
                    .Field<&TapSettings::every_ns>("every_ns")
                    .Field<&TapSettings::sample>("sample")
                    .Field<&TapSettings::always>("always")
                    .Field<&TapSettings::batch>("batch"));
  m.def("run_tap_worker", &RunTapWorker);
  m.def("on_tap_worker", [] { return t_delivers_taps; });
  // The functions that lock the queue release the GIL, so that Python goes on if
  // they have to wait. flush_taps must release it: it waits for the worker, which
  // needs it.
  const nb::call_guard<nb::gil_scoped_release> unlocked;
  m.def("stop_taps", [] { TapQueue::Get().Stop(); }, unlocked);
  m.def(
      "set_tap_limit", [](int64_t bytes) { TapQueue::Get().SetLimit(bytes); },
      nb::arg("bytes"), unlocked);
  m.def("discard_taps", [] { TapQueue::Get().Discard(); }, unlocked);
  m.def(
      "interrupt_pushes",
      [](std::string text) { return TapQueue::Get().Interrupt(std::move(text)); },
      nb::arg("text"), unlocked);
  m.def("tap_mark", [] { return TapQueue::Get().Mark(); });
  m.def(
      "flush_taps",
      [](int64_t mark, double seconds) {
        return TapQueue::Get().Flush(mark, seconds);
      },
      nb::arg("mark"), nb::arg("seconds"), unlocked);
  m.def(
      "await_taps_of_gpus",
      [](double seconds) { return Gpus::Get().streams.Await(seconds); },
      nb::arg("seconds"), unlocked);
  m.def("tap_queue", &QueueState);
  nb::class_<OnePlace>(m, "Throttle")
      .def(nb::init<const TapSettings&>(), nb::arg("settings"))
      .def("lets", &OnePlace::Lets, nb::arg("counters"), nb::arg("always"),
           unlocked);
}

}  // namespace hostcall
