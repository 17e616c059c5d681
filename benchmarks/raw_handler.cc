// A handler of XLA that only enters Python and calls a function without arguments:
// the floor under every callback. Its results are not written.
#include <Python.h>

#include "xla/ffi/api/c_api.h"

namespace {

/// The function, owned; null until it is set. Guarded by the GIL.
PyObject* g_function = nullptr;

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

}  // namespace

extern "C" __attribute__((visibility("default"))) void SetFunction(
    PyObject* function) {
  Py_INCREF(function);
  Py_XSETREF(g_function, function);
}

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* ExecuteRaw(
    XLA_FFI_CallFrame* frame) {
  if (AnswerMetadata(frame)) return nullptr;
  const PyGILState_STATE gil = PyGILState_Ensure();
  PyObject* value = PyObject_CallNoArgs(g_function);
  if (value == nullptr) PyErr_Clear();
  const bool failed = value == nullptr;
  Py_XDECREF(value);
  PyGILState_Release(gil);
  return failed ? Failed(frame->api, "the raw function failed") : nullptr;
}
