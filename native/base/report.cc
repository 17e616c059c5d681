#include "base/report.h"

#include <nanobind/nanobind.h>

namespace nb = nanobind;

namespace hostcall {
namespace {

/// Raises a better exception in place of `error`, and returns false; or true if it
/// stays.
bool Stays(PyObject* error, PyObject* trace) {
  if (HookOf(Hook::kReport) == nullptr) return true;
  if (reinterpret_cast<PyObject*>(Py_TYPE(error)) != PyExc_ValueError) return true;
  const Ref replacement = CallHook(Hook::kReport, error);
  if (!replacement) {
    // A Ctrl-C that came meanwhile is raised in its place.
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return false;
    PyErr_Clear();  // the report failed: the user still gets what JAX raised
    return true;
  }
  if (replacement.get() == Py_None || !PyExceptionInstance_Check(replacement.get()))
    return true;
  // The traceback goes along: it shows where the user's code called the program.
  if (trace != nullptr && PyTraceBack_Check(trace)) {
    PyException_SetTraceback(replacement.get(), trace);
  }
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(replacement.get())),
                  replacement.get());
  return false;
}

#if PY_VERSION_HEX < 0x030C0000

int OnEvent(PyObject*, PyFrameObject*, int what, PyObject* arg) {
  // First, so that the hook runs untraced and no second event comes here.
  PyEval_SetTrace(nullptr, nullptr);
  const bool is_error = what == PyTrace_EXCEPTION && arg != nullptr &&
                        PyTuple_Check(arg) && PyTuple_GET_SIZE(arg) == 3;
  const bool stays =
      !is_error || Stays(PyTuple_GET_ITEM(arg, 1), PyTuple_GET_ITEM(arg, 2));
  return stays ? 0 : -1;
}

#else

PyObject* OnRaise(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count == 3) {  // code, offset, exception
    Ref trace = Ref::Steal(PyException_GetTraceback(args[2]));
    if (!Stays(args[2], trace.get())) return nullptr;
  }
  Py_RETURN_NONE;
}

PyMethodDef g_on_raise = {
    "on_raise",
    reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&OnRaise)),
    METH_FASTCALL, nullptr};

void WatchWith(const nb::handle& monitoring, int tool) {
  const nb::object raise = monitoring.attr("events").attr("RAISE");
  const nb::object function = nb::steal(PyCFunction_New(&g_on_raise, nullptr));
  monitoring.attr("use_tool_id")(tool, "hostcall");
  monitoring.attr("register_callback")(tool, raise, function);
  monitoring.attr("set_events")(tool, raise);
}

/// Tools that no kind of program is meant for (sys.monitoring names the other
/// four). hypothesis uses 3, and warns if it is taken.
constexpr int kTools[] = {4, 3};

#endif

}  // namespace

#if PY_VERSION_HEX < 0x030C0000

void MonitorRaises() {}

void WatchForReport(bool returns) {
  // A debugger or a coverage tool keeps its trace function.
  if (returns && HookOf(Hook::kReport) != nullptr &&
      PyThreadState_Get()->c_tracefunc == nullptr) {
    PyEval_SetTrace(&OnEvent, nullptr);
  }
}

#else

void MonitorRaises() {
  const nb::handle monitoring = PySys_GetObject("monitoring");  // borrowed
  if (!monitoring.is_valid()) return;
  for (const int tool : kTools) {
    try {
      return WatchWith(monitoring, tool);
    } catch (nb::python_error&) {  // somebody else has this one
    }
  }
}

void WatchForReport(bool) {}

#endif

}  // namespace hostcall
