// Handlers of XLA that do less than any callback must: the floors of the rows.
//
//   Empty   nothing but zeros in its first result
//   Raw     enters Python and calls a function without arguments
//   Least   what a call with one float promises: it enters Python, sets JAX's
//   default
//           device, makes the array, calls, checks and stores the result, restores
#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#include <Python.h>
#include <numpy/arrayobject.h>

#include <cstring>

#include "xla/ffi/api/c_api.h"

namespace {

// All are owned, set once, and guarded by the GIL.
PyObject* g_raw;    ///< the function of Raw
PyObject* g_least;  ///< the function of Least
/// JAX's setting, two methods of its class, and the device that Least sets.
PyObject *g_setting, *g_swap, *g_set, *g_device;

/// Answers XLA's question for the handler's version. False for a call.
bool AnswerMetadata(XLA_FFI_CallFrame* frame) {
  for (auto* base = frame->extension_start; base != nullptr; base = base->next) {
    if (base->type != XLA_FFI_Extension_Metadata) continue;
    XLA_FFI_Metadata* metadata =
        reinterpret_cast<XLA_FFI_Metadata_Extension*>(base)->metadata;
    metadata->api_version.major_version = XLA_FFI_API_MAJOR;
    metadata->api_version.minor_version = XLA_FFI_API_MINOR;
    return true;
  }
  return false;
}

XLA_FFI_Error* Failed(const XLA_FFI_Api* api, const char* text) {
  XLA_FFI_Error_Create_Args args;
  args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
  args.extension_start = nullptr;
  args.message = text;
  args.errc = XLA_FFI_Error_Code_INTERNAL;
  return api->XLA_FFI_Error_Create(&args);
}

void* FirstResult(const XLA_FFI_CallFrame* frame) {
  return static_cast<XLA_FFI_Buffer*>(frame->rets.rets[0])->data;
}

/// Calls g_least with the first argument, a float, and stores what it returns.
bool CallWithArray(const XLA_FFI_CallFrame* frame) {
  const auto* given = static_cast<XLA_FFI_Buffer*>(frame->args.args[0]);
  PyObject* array = PyArray_SimpleNew(0, nullptr, NPY_FLOAT32);
  if (array == nullptr) return false;
  std::memcpy(PyArray_DATA(reinterpret_cast<PyArrayObject*>(array)), given->data,
              4);
  PyObject* value = PyObject_Vectorcall(g_least, &array, 1, nullptr);
  Py_DECREF(array);
  auto* made = reinterpret_cast<PyArrayObject*>(value);
  const bool ok = value != nullptr && PyArray_Check(value) &&
                  PyArray_TYPE(made) == NPY_FLOAT32 && PyArray_NDIM(made) == 0;
  if (ok) std::memcpy(FirstResult(frame), PyArray_DATA(made), 4);
  Py_XDECREF(value);
  return ok;
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED void SetRaw(PyObject* function) { g_raw = Py_NewRef(function); }

EXPORTED void SetLeast(PyObject* function, PyObject* setting, PyObject* swap,
                       PyObject* set, PyObject* device) {
  if (_import_array() != 0) return;  // with a Python error set
  g_least = Py_NewRef(function);
  g_setting = Py_NewRef(setting), g_device = Py_NewRef(device);
  g_swap = Py_NewRef(swap), g_set = Py_NewRef(set);
}

EXPORTED XLA_FFI_Error* ExecuteEmpty(XLA_FFI_CallFrame* frame) {
  if (AnswerMetadata(frame)) return nullptr;
  std::memset(FirstResult(frame), 0, 4);
  return nullptr;
}

EXPORTED XLA_FFI_Error* ExecuteLeast(XLA_FFI_CallFrame* frame) {
  if (AnswerMetadata(frame)) return nullptr;
  const PyGILState_STATE gil = PyGILState_Ensure();
  PyObject* to_here[] = {g_setting, g_device};
  PyObject* before = PyObject_Vectorcall(g_swap, to_here, 2, nullptr);
  const bool ok = before != nullptr && CallWithArray(frame);
  PyObject* back[] = {g_setting, before};
  if (before != nullptr) Py_XDECREF(PyObject_Vectorcall(g_set, back, 2, nullptr));
  Py_XDECREF(before);
  if (PyErr_Occurred()) PyErr_Clear();
  PyGILState_Release(gil);
  return ok ? nullptr : Failed(frame->api, "the function failed");
}

EXPORTED XLA_FFI_Error* ExecuteRaw(XLA_FFI_CallFrame* frame) {
  if (AnswerMetadata(frame)) return nullptr;
  const PyGILState_STATE gil = PyGILState_Ensure();
  PyObject* value = PyObject_CallNoArgs(g_raw);
  if (value == nullptr) PyErr_Clear();
  const bool failed = value == nullptr;
  Py_XDECREF(value);
  PyGILState_Release(gil);
  return failed ? Failed(frame->api, "the raw function failed") : nullptr;
}
