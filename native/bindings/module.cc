// The extension module _native: everything of the engine that Python sees.

#define HOSTCALL_IMPORT_NUMPY
#include <nanobind/nanobind.h>

#include "base/engine.h"
#include "base/numpy_api.h"
#include "base/report.h"
#include "base/signals.h"
#include "base/slot_table.h"
#include "bindings/bindings.h"
#include "buffer/buffer_object.h"
#include "invoke/invoke.h"
#include "plan/call_scope.h"

namespace nb = nanobind;

namespace hostcall {
namespace {

/// False with a Python error set. The macro returns its argument on failure.
bool ImportNumpy() {
  import_array1(false);
  return true;
}

/// Binds the signals that wake the watcher (base/signals.h).
void InitSignals(nb::module_& m) {
  nb::enum_<Signals::Event>(m, "Signal", nb::is_flag())
      .value("INTERRUPT", Signals::kInterrupt)
      .value("TERMINATE", Signals::kTerminate)
      .value("ENDING", Signals::kEnding)
      .value("STOP", Signals::kStop)
      .value("BURY", Signals::kBury)
      .value("UNWATCHED", Signals::kUnwatched);
  m.def("watch_sigint", &Signals::WatchInterrupt);
  m.def("watch_sigterm", &Signals::WatchTerminate);
  m.def(
      "wait_signal",
      [](double seconds) {
        GilRelease unlocked;  // Python goes on while the watcher waits
        return static_cast<Signals::Event>(Signals::Wait(seconds));
      },
      nb::arg("seconds"));
  m.def(
      "post_signal", [](Signals::Event event) { Signals::Post(event); },
      nb::arg("event"));
}

/// What open_late was given: a function that returns a bool.
PyObject* g_admits = nullptr;

/// Asks it. Never after the interpreter has begun to end: a thread that asked for
/// the GIL then would be ended.
bool AdmitsLate() {
#if PY_VERSION_HEX >= 0x030D0000
  const bool finalizing = Py_IsFinalizing() != 0;
#else
  const bool finalizing = _Py_IsFinalizing() != 0;
#endif
  if (finalizing || Py_IsInitialized() == 0) return false;
  const GilGuard gil;
  const Ref answer = Call(g_admits);
  if (!answer) PyErr_WriteUnraisable(g_admits);
  return answer.get() == Py_True;
}

/// Binds the engine's life: closing, waiting, forks.
void InitEngine(nb::module_& m) {
  m.def("bury", [] { Graveyard::Get().Bury(); });
  m.def("in_flight", [] { return Engine::Get().in_flight(); });
  m.def("closed", [] { return Engine::Get().closed(); });
  m.def("close", [] { Engine::Get().Close(); });
  m.def(
      "open_late",
      [](nb::object admits) {
        g_admits = admits.release().ptr();  // kept for ever
        Engine::Get().OpenLate(&AdmitsLate);
      },
      nb::arg("admits"));
  // Without the GIL, which the calls in flight need in order to end.
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
  m.def("monitor_raises", &MonitorRaises);
  // Leaks a reference, so that the object is never destroyed.
  m.def(
      "keep_for_ever", [](nb::object thing) { thing.release(); }, nb::arg("thing"));
}

}  // namespace

NB_MODULE(_native, m) {
  if (!ImportNumpy() || !InitInvoke()) throw nb::python_error();
  m.attr("__doc__") = "The engine of hostcall (see native/ in its repository).";
  // When a program dies, the watcher's thread releases the program's Python objects
  // at once. Otherwise they would stay until the next call or tap.
  Graveyard::Get().AskBy([] { Signals::Post(Signals::kBury); });
  // Programs can outlive the module, and their plans with them. nanobind would
  // report these as leaks at exit.
  nb::set_leak_warnings(false);

  InitFeeds(m);
  InitPlans(m);
  InitTaps(m);
  InitCalls(m);
  InitHandlers(m);
  InitSignals(m);
  InitTraces(m);
  InitEngine(m);
  InitBuffers(m);
  m.def(
      "set_buffer_names",
      [](nb::object stage, nb::object ended, nb::object stream) {
        SetBufferNames(stage.ptr(), ended.ptr(), stream.ptr());
      },
      nb::arg("stage"), nb::arg("ended_error"), nb::arg("stream_error"));
}

}  // namespace hostcall
