#include "base/guards.h"

#include <atomic>

#include "base/detached.h"
#include "base/free_threads.h"

namespace hostcall {

HOSTCALL_HOT PyThreadState* t_made_state = nullptr;
HOSTCALL_HOT unsigned t_group = 0;

unsigned NewGroup() {
  static std::atomic<unsigned> next{0};
  t_group = next.fetch_add(1, std::memory_order_relaxed) % kGroups + 1;
  return t_group;
}

namespace {

/// Calls `threading.name()`. Null with a Python error set.
Ref CallThreading(const char* name) {
  const Ref threading = Ref::Steal(PyImport_ImportModule("threading"));
  return threading ? Ask(threading, name) : Ref();
}

/// Does for one of the two functions what TakeOverTracing says. False with a Python
/// error set.
bool TakeOver(const char* get, const char* set) {
  Ref function = CallThreading(get);
  if (!function) return false;
  if (function.get() == Py_None) return true;
  // pydevd (debugpy, PyCharm) up to Python 3.11 ignores threads that `threading`
  // does not know. This makes the thread known, under a name like Dummy-1.
  if (!CallThreading("current_thread")) return false;
  PyObject* setter = PySys_GetObject(set);  // borrowed
  return setter == nullptr || Call(setter, function);
}

}  // namespace

void TakeOverTracing() {
  // An error must not fail the program, which does not ask for a debugger.
  if (!TakeOver("gettrace", "settrace")) PyErr_WriteUnraisable(nullptr);
  if (!TakeOver("getprofile", "setprofile")) PyErr_WriteUnraisable(nullptr);
}

Detached::Detached() : state_(HoldsGil() ? PyEval_SaveThread() : nullptr) {}

Detached::~Detached() {
  if (state_ == nullptr) return;
  OrPark([this] { PyEval_RestoreThread(static_cast<PyThreadState*>(state_)); });
  assert(HoldsGil());
}

}  // namespace hostcall
