// What the Python types of buffer callbacks share.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "plan/call_scope.h"

namespace hostcall {

/// Raises for a Buffer or context that is used after its call. Null.
PyObject* RaiseEnded(const char* what, const char* instead);
/// The jax.Device whose program makes the call.
PyObject* DeviceOf(const ActiveCall& call);

/// Adds the type of contexts to the module.
bool InitContexts(PyObject* module);

template <typename F>
void* Function(F* function) {
  return reinterpret_cast<void*>(function);
}

inline PyTypeObject* MakeType(PyObject* module, const char* name, const char* doc,
                              size_t size, std::vector<PyType_Slot> slots) {
  slots.push_back({Py_tp_doc, const_cast<char*>(doc)});
  slots.push_back({0, nullptr});
  const std::string full = std::string("hostcall.") + name;
  // Python keeps the name's address before 3.12.
  PyType_Spec spec = {strdup(full.c_str()), static_cast<int>(size), 0,
                      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                      slots.data()};
  PyObject* type = PyType_FromSpec(&spec);
  if (type == nullptr || PyModule_AddObjectRef(module, name, type) != 0)
    return nullptr;
  return reinterpret_cast<PyTypeObject*>(type);
}

}  // namespace hostcall
