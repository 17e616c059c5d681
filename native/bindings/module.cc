// The only NB_MODULE: what Python sees of the engine.

#define HOSTCALL_IMPORT_NUMPY
#include <nanobind/nanobind.h>

#include "base/engine.h"
#include "base/numpy_api.h"
#include "base/report.h"
#include "base/signals.h"
#include "base/slot_table.h"
#include "bindings/call_bindings.h"
#include "bindings/handler_bindings.h"
#include "bindings/plan_bindings.h"
#include "bindings/tap_bindings.h"
#include "buffer/buffer_object.h"
#include "plan/call_scope.h"

namespace nb = nanobind;

namespace hostcall {
namespace {

bool ImportNumpy() {
  import_array1(false);
  return true;
}

void InitSignals(nb::module_& m) {
  nb::enum_<Signals::Event>(m, "Signal", nb::is_flag())
      .value("INTERRUPT", Signals::kInterrupt)
      .value("TERMINATE", Signals::kTerminate)
      .value("ENDING", Signals::kEnding)
      .value("STOP", Signals::kStop)
      .value("BURY", Signals::kBury);
  m.def("watch_sigint", &Signals::WatchInterrupt);
  m.def("watch_sigterm", &Signals::WatchTerminate);
  m.def(
      "wait_signal",
      [](double seconds) {
        GilRelease unlocked;
        return static_cast<Signals::Event>(Signals::Wait(seconds));
      },
      nb::arg("seconds"));
  m.def(
      "post_signal", [](Signals::Event event) { Signals::Post(event); },
      nb::arg("event"));
}

void InitEngine(nb::module_& m) {
  m.def("bury", [] { Graveyard::Get().Bury(); });
  m.def("in_flight", [] { return Engine::Get().in_flight(); });
  m.def("closed", [] { return Engine::Get().closed(); });
  m.def("close", [] { Engine::Get().Close(); });
  m.def(
      "wait_idle", [](double seconds) { return Engine::Get().WaitIdle(seconds); },
      nb::arg("seconds"), nb::call_guard<nb::gil_scoped_release>());
  m.def("forked", [] { return Engine::Get().forked(); });
  m.def("leave_behind", [] { Engine::Get().LeaveBehind(); });
  m.def("after_fork", [] {
    Engine::Get().CloseAfterFork();
    ForgetCallsAfterFork();
  });
  m.def(
      "set_report_converter", [](nb::object f) { SetReportConverter(f.ptr()); },
      nb::arg("convert"));
  m.def(
      "keep_for_ever", [](nb::object thing) { thing.release(); }, nb::arg("thing"));
}

}  // namespace

NB_MODULE(_native, m) {
  if (!ImportNumpy()) throw nb::python_error();
  m.attr("__doc__") = "The engine of hostcall (see native/ in its repository).";
  // What a program held is released when the program dies, by the watcher's thread,
  // and does not wait for somebody's next call.
  Graveyard::Get().AskBy([] { Signals::Post(Signals::kBury); });
  // Plans live as long as programs do, and programs can outlive the module.
  nb::set_leak_warnings(false);

  InitPlans(m);
  InitTaps(m);
  InitCalls(m);
  InitHandlers(m);
  InitSignals(m);
  InitEngine(m);
  if (!InitBuffers(m.ptr())) throw nb::python_error();
  m.def(
      "set_buffer_names",
      [](nb::object stage, nb::object ended, nb::object stream) {
        SetBufferNames(stage.ptr(), ended.ptr(), stream.ptr());
      },
      nb::arg("stage"), nb::arg("ended_error"), nb::arg("stream_error"));
}

}  // namespace hostcall
