#include "base/guards.h"

#include <atomic>

#include "base/free_threads.h"

namespace hostcall {

HOSTCALL_HOT PyThreadState* t_made_state = nullptr;
HOSTCALL_HOT unsigned t_group = 0;

unsigned NewGroup() {
  static std::atomic<unsigned> next{0};  // relaxed: groups should only differ
  t_group = next.fetch_add(1, std::memory_order_relaxed) % kGroups + 1;
  return t_group;
}

void TakeOverTracing() {
  const Ref functions = CallHook(Hook::kTracing);
  const char* const setters[] = {"settrace", "setprofile"};
  // They are called from here: a profile function would see the return of any
  // Python code that sets it.
  for (int i = 0; functions && i < 2; ++i) {
    PyObject* function = PyTuple_GET_ITEM(functions.get(), i);  // borrowed
    PyObject* setter = PySys_GetObject(setters[i]);             // borrowed
    if (function != Py_None && setter != nullptr && !Call(setter, function)) break;
  }
  // An error must not fail the program, which does not ask for a debugger.
  if (PyErr_Occurred()) PyErr_WriteUnraisable(nullptr);
}

void* GilRelease::Release() { return HoldsGil() ? PyEval_SaveThread() : nullptr; }

void GilRelease::Restore(void* state) {
  OrPark([state] { PyEval_RestoreThread(static_cast<PyThreadState*>(state)); });
  assert(HoldsGil());
}

}  // namespace hostcall
