// The extension module _native: everything of the engine that Python sees.

#define HOSTCALL_IMPORT_NUMPY
#include <nanobind/nanobind.h>

#include <string>

#include "base/connections.h"
#include "base/engine.h"
#include "base/numpy_api.h"
#include "base/report.h"
#include "base/signals.h"
#include "base/slot_table.h"
#include "bindings/bindings.h"
#include "bindings/keywords.h"
#include "buffer/buffer_object.h"
#include "invoke/call_kind.h"
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
  // Python goes on while the watcher waits.
  m.def("wait_signal", &Signals::Wait, nb::arg("seconds"),
        nb::call_guard<GilRelease>());
  m.def("post_signal", &Signals::Post, nb::arg("event"));
}

/// Asks whether a closed engine makes a call. Never after the interpreter has begun
/// to end: a thread that asked for the GIL then would be ended.
bool AdmitsLate() {
#if PY_VERSION_HEX >= 0x030D0000
  const bool finalizing = Py_IsFinalizing() != 0;
#else
  const bool finalizing = _Py_IsFinalizing() != 0;
#endif
  if (finalizing || Py_IsInitialized() == 0) return false;
  const GilGuard gil;
  const Ref answer = CallHook(Hook::kAdmitsLate);
  if (!answer) PyErr_WriteUnraisable(HookOf(Hook::kAdmitsLate));
  return answer.get() == Py_True;
}

/// Binds the engine's life: closing, waiting, forks.
void InitEngine(nb::module_& m) {
  m.def("bury", [] { Graveyard::Get().Bury(); });
  m.def("in_flight", [] { return Engine::Get().in_flight(); });
  m.def("closed", [] { return Engine::Get().closed(); });
  m.def("close", [] { Engine::Get().Close(); });
  m.def("open_late", [] { Engine::Get().OpenLate(&AdmitsLate); });
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
  BindEnum<Hook>(m, "Hook",
                 {"ADMITS_LATE", "ENDED_ERROR", "PENDING", "PROFILED", "REPORT",
                  "SHOWN", "STAGE", "STREAM_ERROR", "TEXT_READER", "TRACING"});
  m.def(
      "set_hook",
      [](Hook hook, nb::object object) {
        Py_XSETREF(g_hooks[static_cast<int>(hook)], object.release().ptr());
      },
      nb::arg("hook"), nb::arg("made"));
  m.def("monitor_raises", &MonitorRaises);
  // Python raises it in that thread between two instructions, without arguments.
  m.def(
      "raise_in_thread",
      [](unsigned long thread, nb::object type) {
        PyThreadState_SetAsyncExc(thread, type.ptr());
      },
      nb::arg("thread"), nb::arg("type"));
  // Leaks a reference, so that the object is never destroyed.
  m.def(
      "keep_for_ever", [](nb::object object) { object.release(); },
      nb::arg("object"));
}

/// Binds the connections of this process (base/connections.h).
void InitConnections(nb::module_& m) {
  m.def("connections", []() -> nb::object {
    const auto open = Connections();
    if (!open) return nb::none();
    nb::list list;
    for (const Connection& connection : *open) {
      list.append(nb::make_tuple(
          connection.descriptor,
          nb::bytes(connection.local.data(), connection.local.size()),
          nb::bytes(connection.peer.data(), connection.peer.size())));
    }
    return list;
  });
  m.def(
      "shut_down",
      [](int descriptor, nb::bytes local, nb::bytes peer) {
        return ShutDown({descriptor, std::string(local.c_str(), local.size()),
                         std::string(peer.c_str(), peer.size())});
      },
      nb::arg("descriptor"), nb::arg("local"), nb::arg("peer"));
}

}  // namespace

NB_MODULE(_native, m) {
  if (!ImportNumpy() || !InitCallKind()) throw nb::python_error();
  m.attr("__doc__") = "The engine of hostcall (see native/ in its repository).";
  // When a program dies, the watcher's thread releases the program's Python objects
  // at once. Otherwise they would stay until the next call or tap.
  Graveyard::Get().AskBy([] { Signals::Post(Signals::kBury); });
  // Programs can outlive the module, and their plans with them. nanobind would
  // report these as leaks at exit.
  nb::set_leak_warnings(false);

  InitFeeds(m);
  InitKinds(m);
  InitPlans(m);
  InitTaps(m);
  InitCalls(m);
  InitDispatches(m);
  InitHandlers(m);
  InitSignals(m);
  InitConnections(m);
  InitFlight(m);
  InitEngine(m);
  InitBuffers(m);
}

}  // namespace hostcall
