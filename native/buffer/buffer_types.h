// Helpers that the Python types of buffer callbacks share. The GIL is held in all
// of them.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "buffer/lease.h"
#include "plan/call_scope.h"

namespace hostcall {

/// Sets the error for a `what` (Buffer or context) that is used after its call;
/// `instead` says what to do. Returns null.
PyObject* RaiseEnded(const char* what, const char* instead);
/// The jax.Device that runs the program of the call; a new reference, or null with
/// a Python error set. `check` sets the error of a call that has ended. Python code
/// answers, so it is asked after the use.
PyObject* DeviceOf(Lease& lease, bool (*check)(const Lease::Use& use));

/// Whether a Buffer is open, and the host can read its memory; false with a Python
/// error set.
bool OnHost(const Lease::Use& use);
/// The slots of the buffer protocol.
int GetBuffer(PyObject* self, Py_buffer* view, int flags);
void ReleaseBuffer(PyObject* self, Py_buffer* view);

/// Adds ExecutionContext to the module. False with a Python error set.
bool InitContexts(PyObject* module);

/// A function as PyType_Slot wants it.
template <typename F>
void* Function(F* function) {
  return reinterpret_cast<void*>(function);
}

/// Makes a type with these slots, and adds it to the module. Its instances are made
/// by C++ only. Null with a Python error set.
inline PyTypeObject* MakeType(PyObject* module, const char* name, const char* doc,
                              size_t size, std::vector<PyType_Slot> slots) {
  slots.push_back({Py_tp_doc, const_cast<char*>(doc)});
  slots.push_back({0, nullptr});
  const std::string full = std::string("hostcall.") + name;
  // Before 3.12 Python keeps the address of the name, so the copy is never freed.
  PyType_Spec spec = {strdup(full.c_str()), static_cast<int>(size), 0,
                      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                      slots.data()};
  PyObject* type = PyType_FromSpec(&spec);
  if (type == nullptr || PyModule_AddObjectRef(module, name, type) != 0)
    return nullptr;
  return reinterpret_cast<PyTypeObject*>(type);
}

}  // namespace hostcall
