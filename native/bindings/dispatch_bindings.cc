// What JAX's C++ calls after it has dispatched a program with host calls.
//
// The idea: a thread hears of the failures of the programs that it has dispatched,
// so it notes each one that may not have ended. JAX's fast path runs no Python, but
// it puts the results together by a tree, and for such programs a node of the tree
// is hostcall's (_jax/signs.py). Its function is below. Among the results it gets
// the program's sign: an array that is ready when the program has ended, and failed
// if the program has.
//
// Most programs have ended when their dispatch returns, and did not fail. For these
// nothing is noted. If one of the program's calls ran on this thread, the program
// has ended (base/last_run.h); else the sign says so.
//
// When is a program known not to have failed? A failed call is counted before its
// program ends. So:
//
//   1. the thread: notes the count, at the dispatch before this one
//   2. the thread: dispatches this program
//   3. the thread: sees that the program has ended
//   4. the thread: finds the count of step 1
//
// No call of any program failed between 1 and 4, so none of this program's.
// Otherwise Python looks at the sign itself.
#include <nanobind/nanobind.h>

#include <cassert>
#include <cstdint>
#include <cstring>

#include "base/guards.h"
#include "base/last_run.h"
#include "bindings/bindings.h"

namespace nb = nanobind;

namespace hostcall {
namespace {

/// What belongs to a thread that dispatches, and is used by it alone.
struct Dispatches {
  uint64_t failures = 0;  ///< the count at its dispatch before
  bool pending = false;   ///< programs are noted, which may have ended by now
};
thread_local Dispatches t_dispatches;

/// Whether the sign is ready. False if it was deleted: Python looks at it then.
bool IsReady(PyObject* sign) {
  static PyObject* const is_ready = PyUnicode_InternFromString("is_ready");
  PyObject* const stack[] = {sign};
  const Ref ready = Ref::Steal(OrPark(
      [&] { return PyObject_VectorcallMethod(is_ready, stack, 1, nullptr); }));
  if (!ready) PyErr_Clear();
  return ready.get() == Py_True;
}

/// Whether the call that this thread has run last is one of these: `plans` has the
/// addresses of a program's plans as bytes (Slot::plan), or is anything else.
bool RanHere(PyObject* plans) {
  const void* const last = TakeLastRun();
  if (last == nullptr || !PyBytes_CheckExact(plans)) return false;
  const char* next = PyBytes_AS_STRING(plans);
  const char* const end = next + PyBytes_GET_SIZE(plans);
  for (; end - next >= static_cast<Py_ssize_t>(sizeof last); next += sizeof last) {
    if (std::memcmp(next, &last, sizeof last) == 0) return true;
  }
  return false;
}

/// (plans, (results, ..., sign)) -> results, for the calling thread's newest
/// dispatch. The results and the sign may be one.
PyObject* Dispatched(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 2 || !PyTuple_Check(args[1]) || PyTuple_GET_SIZE(args[1]) == 0) {
    PyErr_SetString(PyExc_TypeError, "a tuple that ends with a sign is wanted");
    return nullptr;
  }
  PyObject* const results = PyTuple_GET_ITEM(args[1], 0);
  const Py_ssize_t last = PyTuple_GET_SIZE(args[1]) - 1;
  PyObject* const sign = PyTuple_GET_ITEM(args[1], last);
  Dispatches& dispatches = t_dispatches;
  const uint64_t failures_before = dispatches.failures;
  dispatches.failures = g_failures.load();
  // It takes the thread's note, so it is asked always.
  const bool ran_here = RanHere(args[0]);
  // If others are noted, Python asks this sign with them: to ask one of several
  // devices takes longer than the rest. The count comes last: step 4.
  if (dispatches.pending || !(ran_here || IsReady(sign)) ||
      g_failures.load() != failures_before) {
    PyObject* const is_hidden = last > 0 ? Py_True : Py_False;
    if (!CallHook(Hook::kPending, sign, is_hidden)) return nullptr;
  }
  return Ref::Borrow(results).release();
}

PyMethodDef g_dispatched = {
    "dispatched",
    reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&Dispatched)),
    METH_FASTCALL, nullptr};

}  // namespace

void InitDispatches(nb::module_& m) {
  m.attr("dispatched") = nb::steal(PyCFunction_New(&g_dispatched, nullptr));
  m.def("count_failure", [] { ++g_failures; });
  m.def("forget_last_run", [] { TakeLastRun(); });
  m.def(
      "set_pending", [](bool pending) { t_dispatches.pending = pending; },
      nb::arg("pending"));
}

}  // namespace hostcall
