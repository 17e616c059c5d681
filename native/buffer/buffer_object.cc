#include "buffer/buffer_object.h"

#include <cstring>
#include <exception>
#include <mutex>
#include <new>
#include <string>
#include <utility>

#include "base/code.h"
#include "buffer/buffer_types.h"
#include "cuda/streams.h"
#include "plan/arrays.h"

namespace hostcall {
namespace {

/// Set by InitBuffers; lives as long as the process.
PyTypeObject* g_buffer_type = nullptr;

/// The shape of one row; a new reference.
PyObject* ShapeTuple(const Leaf& leaf) {
  PyObject* shape = PyTuple_New(static_cast<Py_ssize_t>(leaf.dims.size()));
  for (size_t i = 0; shape != nullptr && i < leaf.dims.size(); ++i) {
    PyTuple_SET_ITEM(shape, static_cast<Py_ssize_t>(i),
                     PyLong_FromSsize_t(leaf.dims[i]));
  }
  return shape;
}

// --- Attributes ----------------------------------------------------------------

/// `get(buffer, call)` of an open Buffer; of a closed one null with a Python error
/// set.
template <typename Get>
PyObject* IfOpen(PyObject* self, Get get) {
  BufferObject* buffer = AsBuffer(self);
  const Lease::Use use(buffer->lease);
  return CheckOpen(use) ? get(buffer, *use) : nullptr;
}

PyObject* GetShape(PyObject* self, void*) {
  return IfOpen(self, [](BufferObject* b, const ActiveCall&) {
    return ShapeTuple(*b->leaf);
  });
}
PyObject* GetDtype(PyObject* self, void*) {
  return IfOpen(self, [](BufferObject* b, const ActiveCall&) {
    Py_INCREF(b->leaf->dtype.get());
    return b->leaf->dtype.get();
  });
}
PyObject* GetNdim(PyObject* self, void*) {
  return IfOpen(self, [](BufferObject* b, const ActiveCall&) {
    return PyLong_FromSize_t(b->leaf->dims.size());
  });
}
PyObject* GetSize(PyObject* self, void*) {
  return IfOpen(self, [](BufferObject* b, const ActiveCall&) {
    return PyLong_FromLongLong(b->leaf->count);
  });
}
PyObject* GetNbytes(PyObject* self, void*) {
  return IfOpen(self, [](BufferObject* b, const ActiveCall& call) {
    const Leaf& leaf = *b->leaf;
    // Small elements are packed on a GPU; the host sees an unpacked copy.
    const bool packed = call.on_gpu() && leaf.bits != 0;
    return PyLong_FromLongLong(packed ? (leaf.count * leaf.bits + 7) / 8
                                      : leaf.row_bytes);
  });
}
PyObject* GetWriteable(PyObject* self, void*) {
  return IfOpen(self, [](BufferObject* b, const ActiveCall&) {
    return PyBool_FromLong(b->writeable);
  });
}
PyObject* GetPtr(PyObject* self, void*) {
  return IfOpen(self, [](BufferObject* b, const ActiveCall&) {
    return PyLong_FromVoidPtr(b->data);
  });
}

PyObject* GetDevice(PyObject* self, void*) {
  return DeviceOf(AsBuffer(self)->lease, &CheckOpen);
}

PyObject* GetCudaInterface(PyObject* self, void*) {
  return IfOpen(self, [](BufferObject* b, const ActiveCall& call) -> PyObject* {
    if (!call.on_gpu() || b->leaf->bits != 0) {
      PyErr_SetString(
          PyExc_AttributeError,
          !call.on_gpu()
              ? "hostcall: this Buffer is CPU memory, which has no "
                "__cuda_array_interface__: use numpy.asarray or "
                "DLPack" HOSTCALL_CODE("hc-buffer")
              : "hostcall: __cuda_array_interface__ can't describe "
                "elements smaller than a byte" HOSTCALL_CODE("hc-buffer"));
      return nullptr;
    }
    Ref shape = Ref::Steal(ShapeTuple(*b->leaf));
    Ref typestr = Ref::Steal(PyObject_GetAttrString(b->leaf->dtype.get(), "str"));
    if (!shape || !typestr) return nullptr;
    b->interface_read = true;
    // Who reads a stream here waits for it (CuPy does), which ends a recording.
    // There it is None: the function works on the context's stream, and need not
    // wait.
    bool captured = false;
    try {
      captured = IsCaptured(call.stream);
    } catch (const std::exception& error) {
      PyErr_SetString(PyExc_RuntimeError, error.what());
      return nullptr;
    }
    // The interface forbids 0; the legacy default stream is called 1.
    auto stream = reinterpret_cast<uintptr_t>(call.stream);
    return Py_BuildValue(
        "{sOsOs(NO)sOsisN}", "shape", shape.get(), "typestr", typestr.get(), "data",
        PyLong_FromVoidPtr(b->leaf->count == 0 ? nullptr : b->data),
        b->writeable ? Py_False : Py_True, "strides", Py_None, "version", 3,
        "stream",
        captured ? Ref::Borrow(Py_None).release()
                 : PyLong_FromSize_t(stream == 0 ? 1 : stream));
  });
}

// --- Methods -------------------------------------------------------------------

/// A new view of the Buffer's one array. Null with a Python error set. Each reader
/// gets a view, and may change its shape and flags. It holds a reference to the
/// array, which is how IsHeld counts it.
Ref ViewOf(BufferObject* b) {
  const Lease::Use use(b->lease);
  if (!OnHost(use)) return Ref();
  Ref made,
      lost;  // by whoever comes first; a second one, destroyed without the lock
  {
    const std::lock_guard<AttachedMutex> lock(b->mutex);
    made = Ref::Borrow(b->array);
  }
  if (!made) {
    made = LentArray(*b->leaf, b->data, b->writeable);
    if (!made) return Ref();
    const std::lock_guard<AttachedMutex> lock(b->mutex);
    if (b->array == nullptr) {
      b->array = Ref::Borrow(made.get()).release();
    } else {  // only views of the one array are counted
      lost = std::exchange(made, Ref::Borrow(b->array));
    }
  }
  auto* whole = reinterpret_cast<PyArrayObject*>(made.get());
  Ref view = Ref::Steal(PyArray_View(whole, nullptr, nullptr));
  // Else it might be freed long after its last reference has gone, by this thread.
  if (view) Merge(view.get());
  return view;
}

/// __array__(dtype=None, copy=None)
PyObject* ToArray(PyObject* self, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"dtype", "copy", nullptr};
  PyObject *dtype = Py_None, *copy = Py_None;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|OO", const_cast<char**>(names),
                                   &dtype, &copy)) {
    return nullptr;
  }
  Ref array = ViewOf(AsBuffer(self));
  if (!array) return nullptr;
  if (dtype != Py_None) {
    PyArray_Descr* wanted = nullptr;
    if (PyArray_DescrConverter(dtype, &wanted) == 0) return nullptr;
    Ref held = Ref::Steal(reinterpret_cast<PyObject*>(wanted));
    if (!PyArray_EquivTypes(
            wanted, PyArray_DESCR(reinterpret_cast<PyArrayObject*>(array.get())))) {
      if (copy == Py_False) {
        PyErr_SetString(
            PyExc_ValueError,
            "hostcall: another dtype needs a copy, but copy=False" HOSTCALL_CODE(
                "hc-buffer"));
        return nullptr;
      }
      return PyObject_CallMethod(array.get(), "astype", "O", held.get());
    }
  }
  if (copy == Py_True) return PyObject_CallMethod(array.get(), "copy", nullptr);
  return array.release();
}

PyObject* DLPackMethod(PyObject* self, PyObject* const* args, Py_ssize_t n,
                       PyObject* names) {
  BufferObject* b = AsBuffer(self);
  const Lease::Use use(b->lease);
  return CheckOpen(use) ? ExportTensor(b, *use, args, n, names) : nullptr;
}

PyObject* DLPackDevice(PyObject* self, PyObject*) {
  return IfOpen(self, [](BufferObject*, const ActiveCall& call) {
    return Py_BuildValue("(ii)", call.on_gpu() ? 2 : 1,
                         call.on_gpu() ? call.device_ordinal : 0);
  });
}

PyObject* BufferRepr(PyObject* self) {
  BufferObject* b = AsBuffer(self);
  Ref shape, dtype;
  {
    const Lease::Use use(b->lease);
    if (!use) return PyUnicode_FromString("<Buffer of a call that ended>");
    shape = Ref::Steal(ShapeTuple(*b->leaf));
    dtype = Ref::Borrow(b->leaf->dtype.get());
  }
  if (!shape) return nullptr;
  return PyUnicode_FromFormat("<Buffer %S%S, %s>", dtype.get(), shape.get(),
                              b->writeable ? "writeable" : "read-only");
}

void DeallocBuffer(PyObject* self) {
  BufferObject* b = AsBuffer(self);
  Py_XDECREF(b->array);
  delete b->tensors;
  delete b->before;
  delete b->layout;
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyGetSetDef buffer_attributes[] = {
    {"shape", GetShape, nullptr, "Sizes, as a tuple.", nullptr},
    {"dtype", GetDtype, nullptr, "NumPy's dtype of the elements.", nullptr},
    {"ndim", GetNdim, nullptr, "Number of dimensions.", nullptr},
    {"size", GetSize, nullptr, "Number of elements.", nullptr},
    {"nbytes", GetNbytes, nullptr, "Bytes of all elements.", nullptr},
    {"writeable", GetWriteable, nullptr, "True for outputs.", nullptr},
    {"device", GetDevice, nullptr, "The jax.Device whose memory it is.", nullptr},
    {"ptr", GetPtr, nullptr, "Address of the first element, row-major.", nullptr},
    {"__cuda_array_interface__", GetCudaInterface, nullptr,
     "On a GPU: version 3, with the stream to work on.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyMethodDef buffer_methods[] = {
    {"__array__", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(ToArray)),
     METH_VARARGS | METH_KEYWORDS, "__array__(dtype=None, copy=None)"},
    {"__dlpack__",
     reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(DLPackMethod)),
     METH_FASTCALL | METH_KEYWORDS,
     "__dlpack__(*, stream=None, max_version=None, dl_device=None, copy=None)"},
    {"__dlpack_device__", DLPackDevice, METH_NOARGS,
     "(device type, device number)"},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

bool CheckOpen(const Lease::Use& use) {
  if (use) return true;
  RaiseEnded("Buffer", "Keep a copy: numpy.array(buffer)");
  return false;
}

bool IsBuffer(PyObject* object) { return Py_TYPE(object) == g_buffer_type; }
PyObject* NewBuffer() {
  PyObject* made = g_buffer_type->tp_alloc(g_buffer_type, 0);
  if (made != nullptr) Merge(made);
  return made;
}

void OpenBuffer(BufferObject* b, const ActiveCall& call, const Leaf& leaf,
                char* data, bool writeable) {
  b->leaf = &leaf;
  b->data = data;
  b->writeable = writeable;
  b->lease.Begin(call);
}

bool IsHeld(BufferObject* b) {
  if (b->array != nullptr && DropIfLast(b->array)) b->array = nullptr;
  return b->array != nullptr || b->exports.value() != 0 ||
         (b->tensors != nullptr && (*b->tensors)->load() != 0) ||
         (b->interface_read && IsHeldElsewhere(reinterpret_cast<PyObject*>(b)));
}

bool KeepBefore(BufferObject* b, const ActiveCall& call) {
  const int64_t bytes = b->leaf->row_bytes;
  if (b->writeable || call.on_gpu() || bytes > kWatchedBytes) return true;
  if (call.plan->buffers.Shares(b->leaf - call.plan->args.data())) return true;
  const std::lock_guard<AttachedMutex> lock(b->mutex);
  try {
    if (b->before == nullptr) b->before = new std::vector<char>();
    if (b->before->empty()) b->before->assign(b->data, b->data + bytes);
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
    return false;
  }
  return true;
}

bool WasChanged(BufferObject* b) {
  if (b->before == nullptr || b->before->empty()) return false;
  const bool same = std::memcmp(b->data, b->before->data(), b->before->size()) == 0;
  if (!same) std::memcpy(b->data, b->before->data(), b->before->size());
  b->before->clear();
  return !same;
}

bool CloseBuffer(BufferObject* b) {
  b->lease.End();
  // IsHeld first: it lets go of the array.
  const bool alone = !IsHeld(b) && !IsHeldElsewhere(reinterpret_cast<PyObject*>(b));
  if (b->array != nullptr) {  // somebody holds it
    if (b->leaf != nullptr) Disown(b->array, *b->leaf);
    Py_CLEAR(b->array);
  }
  b->leaf = nullptr;
  b->interface_read.store(false, std::memory_order_relaxed);
  return alone;
}

bool InitBuffers(PyObject* module) {
  g_buffer_type = MakeType(
      module, "Buffer",
      "An array of XLA, for as long as its callback runs.\n\n"
      "Read it with numpy.asarray, as a memoryview, with DLPack "
      "(torch.from_dlpack), on a GPU with __cuda_array_interface__; write to "
      "an output in the same ways (numpy.asarray(out)[...] = values). A view "
      "that is kept after the call is an error.",
      sizeof(BufferObject),
      {{Py_tp_dealloc, Function(DeallocBuffer)},
       {Py_tp_repr, Function(BufferRepr)},
       {Py_tp_getset, buffer_attributes},
       {Py_tp_methods, buffer_methods},
       {Py_bf_getbuffer, Function(GetBuffer)},
       {Py_bf_releasebuffer, Function(ReleaseBuffer)}});
  return g_buffer_type != nullptr && InitContexts(module);
}

}  // namespace hostcall
