// Python's ExecutionContext, and the helpers that it shares with Buffer.

#include "buffer/buffer_object.h"
#include "buffer/buffer_types.h"

namespace hostcall {
namespace {

// References that live as long as the process, set when hostcall is imported.
PyTypeObject* g_context_type = nullptr;
PyObject* g_stage = nullptr;         // ExecutionStage.EXECUTE
PyObject* g_ended_error = nullptr;   // raised when something is used after its call
PyObject* g_stream_error = nullptr;  // raised for `stream` on a CPU, as JAX does

/// Whether the call of a context goes on; false with a Python error set if not.
bool CheckContext(const Lease::Use& use) {
  if (!use) RaiseEnded("context", "Take what you need during the call.");
  return static_cast<bool>(use);
}
/// `get(call)` of the call of a context; null with a Python error set if it has
/// ended.
template <typename Get>
PyObject* OfCall(PyObject* self, Get get) {
  const Lease::Use use(AsContext(self)->lease);
  return CheckContext(use) ? get(*use) : nullptr;
}

PyObject* GetStage(PyObject* self, void*) {
  return OfCall(self, [](const ActiveCall&) {
    Py_INCREF(g_stage);
    return g_stage;
  });
}
PyObject* GetStream(PyObject* self, void*) {
  return OfCall(self, [](const ActiveCall& call) -> PyObject* {
    if (call.on_gpu()) return PyLong_FromVoidPtr(call.stream);
    PyErr_SetString(g_stream_error, "XLA FFI GPU context is not available");
    return nullptr;
  });
}
PyObject* GetContextDevice(PyObject* self, void*) {
  return DeviceOf(AsContext(self)->lease, &CheckContext);
}
PyObject* GetRun(PyObject* self, void*) {
  return OfCall(
      self, [](const ActiveCall& call) { return PyLong_FromLongLong(call.run); });
}
void DeallocContext(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

/// What cuda.core, CuPy and others ask an object for whose stream they shall use:
/// the protocol's version, and the address.
PyObject* CudaStreamOf(PyObject* self, PyObject*) {
  return OfCall(self, [](const ActiveCall& call) -> PyObject* {
    if (call.on_gpu())
      return Py_BuildValue("iN", 0, PyLong_FromVoidPtr(call.stream));
    PyErr_SetString(g_stream_error, "XLA FFI GPU context is not available");
    return nullptr;
  });
}

PyMethodDef context_methods[] = {
    {"__cuda_stream__", CudaStreamOf, METH_NOARGS,
     "(0, stream): cupy.cuda.Stream.from_external(ctx) works on XLA's stream."},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef context_attributes[] = {
    {"stage", GetStage, nullptr, "ExecutionStage.EXECUTE.", nullptr},
    {"stream", GetStream, nullptr,
     "On a GPU the address of XLA's stream (a CUstream), on which to work. "
     "Raises jax.errors.JaxRuntimeError on a CPU.",
     nullptr},
    {"device", GetContextDevice, nullptr, "The jax.Device that runs the program.",
     nullptr},
    {"run", GetRun, nullptr,
     "XLA's number of this execution; -1 for an eager call.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

}  // namespace

PyObject* RaiseEnded(const char* what, const char* instead) {
  PyErr_Format(g_ended_error != nullptr ? g_ended_error : PyExc_RuntimeError,
               "hostcall: this %s belongs to a call that has ended; its memory is "
               "XLA's again. %s",
               what, instead);
  return nullptr;
}

PyObject* DeviceOf(Lease& lease, bool (*check)(const Lease::Use& use)) {
  Ref info;
  int ordinal;
  {
    const Lease::Use use(lease);
    if (!check(use)) return nullptr;
    info = Ref::Borrow(use->plan->info.get());
    ordinal = use->device_ordinal;
  }
  return PyObject_CallMethod(info.get(), "device_at", "i", ordinal);
}
PyObject* NewContext() {
  PyObject* made = g_context_type->tp_alloc(g_context_type, 0);
  if (made != nullptr) Merge(made);
  return made;
}

bool InitContexts(PyObject* module) {
  g_context_type = MakeType(
      module, "ExecutionContext",
      "What a buffer callback can ask about the call it is in.\n\n"
      "Attributes:\n"
      "    stage: ExecutionStage.EXECUTE.\n"
      "    stream: on a GPU the address of XLA's stream, on which to work.\n"
      "        On a CPU it raises JaxRuntimeError (`hc.current().stream` is\n"
      "        None there).\n"
      "    device: the jax.Device that runs the program.\n"
      "    run: XLA's number of this execution; -1 for an eager call.",
      sizeof(ContextObject),
      {{Py_tp_dealloc, Function(DeallocContext)},
       {Py_tp_methods, context_methods},
       {Py_tp_getset, context_attributes}});
  return g_context_type != nullptr;
}

void SetBufferNames(PyObject* stage, PyObject* ended_error,
                    PyObject* stream_error) {
  for (PyObject* name : {stage, ended_error, stream_error}) Py_INCREF(name);
  Py_XSETREF(g_stage, stage);
  Py_XSETREF(g_ended_error, ended_error);
  Py_XSETREF(g_stream_error, stream_error);
}

}  // namespace hostcall
