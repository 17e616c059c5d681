#include "base/report.h"

namespace hostcall {
namespace {

/// The Python function that makes the better exception; null before it is set.
/// Guarded by the GIL.
PyObject* g_convert = nullptr;

/// The trace function that WatchForReport sets. 0 lets the thread go on; -1 raises
/// the Python error that is set in place of the traced exception.
int OnEvent(PyObject*, PyFrameObject*, int what, PyObject* arg) {
  // First, so that g_convert runs untraced and no second event comes here.
  PyEval_SetTrace(nullptr, nullptr);
  if (what != PyTrace_EXCEPTION || arg == nullptr || !PyTuple_Check(arg) ||
      PyTuple_GET_SIZE(arg) != 3) {
    return 0;
  }
  PyObject* stack[] = {PyTuple_GET_ITEM(arg, 1)};
  Ref other = Ref::Steal(CallPython(g_convert, stack, 1, nullptr));
  if (!other) {  // the report failed: the user still gets what JAX raised
    PyErr_Clear();
    return 0;
  }
  if (other.get() == Py_None || !PyExceptionInstance_Check(other.get())) return 0;
  // The traceback goes along: it shows where the user's code called the program.
  PyObject* trace = PyTuple_GET_ITEM(arg, 2);
  if (PyTraceBack_Check(trace)) PyException_SetTraceback(other.get(), trace);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(other.get())), other.get());
  return -1;
}

}  // namespace

void SetReportConverter(PyObject* convert) {
  Py_XINCREF(convert);
  Py_XSETREF(g_convert, convert);
}

void WatchForReport() {
  if (g_convert == nullptr) return;
  Ref sys = Ref::Steal(PyImport_ImportModule("sys"));
  Ref set =
      sys ? Ref::Steal(PyObject_CallMethod(sys.get(), "gettrace", nullptr)) : Ref();
  if (!set) {
    PyErr_Clear();
    return;
  }
  // A debugger or a coverage tool keeps its trace function.
  if (set.get() == Py_None) PyEval_SetTrace(&OnEvent, nullptr);
}

}  // namespace hostcall
