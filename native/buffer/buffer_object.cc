#include "buffer/buffer_object.h"

#include <cstring>
#include <new>
#include <string>

#include "base/code.h"
#include "buffer/buffer_types.h"
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

/// `get(buffer)` of an open Buffer; of a closed one null with a Python error set.
template <typename Get>
PyObject* IfOpen(PyObject* self, Get get) {
  BufferObject* buffer = AsBuffer(self);
  return CheckOpen(buffer) ? get(buffer) : nullptr;
}

PyObject* GetShape(PyObject* self, void*) {
  return IfOpen(self, [](BufferObject* b) { return ShapeTuple(*b->leaf); });
}
PyObject* GetDtype(PyObject* self, void*) {
  return IfOpen(self, [](BufferObject* b) {
    Py_INCREF(b->leaf->dtype.get());
    return b->leaf->dtype.get();
  });
}
PyObject* GetNdim(PyObject* self, void*) {
  return IfOpen(self, [](BufferObject* b) {
    return PyLong_FromSize_t(b->leaf->dims.size());
  });
}
PyObject* GetSize(PyObject* self, void*) {
  return IfOpen(
      self, [](BufferObject* b) { return PyLong_FromLongLong(b->leaf->count); });
}
PyObject* GetNbytes(PyObject* self, void*) {
  return IfOpen(self, [](BufferObject* b) {
    const Leaf& leaf = *b->leaf;
    // Small elements are packed on a GPU; the host sees an unpacked copy.
    const bool packed = b->call->on_gpu() && leaf.bits != 0;
    return PyLong_FromLongLong(packed ? (leaf.count * leaf.bits + 7) / 8
                                      : leaf.row_bytes);
  });
}
PyObject* GetWriteable(PyObject* self, void*) {
  return IfOpen(self,
                [](BufferObject* b) { return PyBool_FromLong(b->writeable); });
}
PyObject* GetPtr(PyObject* self, void*) {
  return IfOpen(self, [](BufferObject* b) { return PyLong_FromVoidPtr(b->data); });
}

PyObject* GetDevice(PyObject* self, void*) {
  return IfOpen(self, [](BufferObject* b) { return DeviceOf(*b->call); });
}

PyObject* GetCudaInterface(PyObject* self, void*) {
  return IfOpen(self, [](BufferObject* b) -> PyObject* {
    if (!b->call->on_gpu() || b->leaf->bits != 0) {
      PyErr_SetString(
          PyExc_AttributeError,
          !b->call->on_gpu()
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
    // The interface forbids 0; the legacy default stream is called 1.
    auto stream = reinterpret_cast<uintptr_t>(b->call->stream);
    return Py_BuildValue(
        "{sOsOs(NO)sOsisn}", "shape", shape.get(), "typestr", typestr.get(), "data",
        PyLong_FromVoidPtr(b->leaf->count == 0 ? nullptr : b->data),
        b->writeable ? Py_False : Py_True, "strides", Py_None, "version", 3,
        "stream", static_cast<Py_ssize_t>(stream == 0 ? 1 : stream));
  });
}

// --- Methods -------------------------------------------------------------------

/// Whether the host can read the memory of an open Buffer; false with a Python
/// error set.
bool OnHost(BufferObject* b) {
  if (!CheckOpen(b)) return false;
  if (!b->call->on_gpu()) return true;
  PyErr_SetString(
      PyExc_TypeError,
      "hostcall: this Buffer is GPU memory, which NumPy can't read. "
      "Use __cuda_array_interface__ (cupy.asarray, numba.cuda) or DLPack "
      "(torch.from_dlpack), on ctx.stream" HOSTCALL_CODE("hc-buffer"));
  return false;
}

/// __array__(dtype=None, copy=None)
PyObject* ToArray(PyObject* self, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"dtype", "copy", nullptr};
  PyObject *dtype = Py_None, *copy = Py_None;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|OO", const_cast<char**>(names),
                                   &dtype, &copy)) {
    return nullptr;
  }
  BufferObject* b = AsBuffer(self);
  if (!OnHost(b)) return nullptr;
  if (b->array == nullptr) {
    b->array = LentArray(*b->leaf, b->data, b->writeable).release();
    if (b->array == nullptr) return nullptr;
  }
  // A view for each reader, who may change its shape and flags. It holds a
  // reference to the array, which is how IsHeld counts it.
  auto* whole = reinterpret_cast<PyArrayObject*>(b->array);
  Ref array = Ref::Steal(PyArray_View(whole, nullptr, nullptr));
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
  return CheckOpen(b) ? ExportTensor(b, args, n, names) : nullptr;
}

PyObject* DLPackDevice(PyObject* self, PyObject*) {
  return IfOpen(self, [](BufferObject* b) {
    return Py_BuildValue("(ii)", b->call->on_gpu() ? 2 : 1,
                         b->call->on_gpu() ? b->call->device_ordinal : 0);
  });
}

PyObject* BufferRepr(PyObject* self) {
  BufferObject* b = AsBuffer(self);
  if (b->plan == nullptr)
    return PyUnicode_FromString("<Buffer of a call that ended>");
  Ref shape = Ref::Steal(ShapeTuple(*b->leaf));
  if (!shape) return nullptr;
  return PyUnicode_FromFormat("<Buffer %S%S, %s>", b->leaf->dtype.get(),
                              shape.get(),
                              b->writeable ? "writeable" : "read-only");
}

// --- The buffer protocol -------------------------------------------------------

/// The struct module's letter for a dtype; null if it has none.
const char* FormatOf(PyArray_Descr* descr) {
  switch (descr->type_num) {
    case NPY_BOOL:
      return "?";
    case NPY_BYTE:
      return "b";
    case NPY_UBYTE:
      return "B";
    case NPY_SHORT:
      return "h";
    case NPY_USHORT:
      return "H";
    case NPY_INT:
      return "i";
    case NPY_UINT:
      return "I";
    case NPY_LONG:
      return "l";
    case NPY_ULONG:
      return "L";
    case NPY_HALF:
      return "e";
    case NPY_FLOAT:
      return "f";
    case NPY_DOUBLE:
      return "d";
    default:
      return nullptr;
  }
}

int GetBuffer(PyObject* self, Py_buffer* view, int flags) {
  view->obj = nullptr;
  BufferObject* b = AsBuffer(self);
  if (!OnHost(b)) return -1;
  const Leaf& leaf = *b->leaf;
  const char* format = FormatOf(leaf.descr());
  if (format == nullptr) {
    // NumPy then asks for __array__. A constant text, since NumPy comes here for
    // every array of such a dtype, and formatting would cost.
    PyErr_SetString(PyExc_BufferError,
                    "hostcall: Python's struct module has no letter for this "
                    "Buffer's dtype, so the buffer protocol can't describe it; use "
                    "numpy.asarray" HOSTCALL_CODE("hc-buffer"));
    return -1;
  }
  if ((flags & PyBUF_WRITABLE) != 0 && !b->writeable) {
    PyErr_SetString(PyExc_BufferError,
                    "hostcall: this Buffer is an input, which can't be written "
                    "to" HOSTCALL_CODE("hc-buffer"));
    return -1;
  }
  const size_t ndim = leaf.dims.size();
  constexpr int kAnyOrder =
      PyBUF_C_CONTIGUOUS | PyBUF_F_CONTIGUOUS | PyBUF_ANY_CONTIGUOUS;
  const bool fortran = (flags & kAnyOrder) == PyBUF_F_CONTIGUOUS;
  if (fortran && ndim > 1 && leaf.count > 1) {
    PyErr_SetString(PyExc_BufferError,
                    "hostcall: this Buffer is row-major, so it has no column-major "
                    "view" HOSTCALL_CODE("hc-buffer"));
    return -1;
  }
  // Exports point into the layout, so it is only made while there are none. All
  // exports of a call have the same one.
  if (b->exports == 0) {
    try {
      if (b->layout == nullptr) b->layout = new std::vector<Py_ssize_t>();
      b->layout->resize(2 * ndim);
    } catch (const std::bad_alloc&) {
      PyErr_NoMemory();
      return -1;
    }
    Py_ssize_t step = PyDataType_ELSIZE(leaf.descr());
    for (size_t i = ndim; i-- > 0;) {
      (*b->layout)[i] = leaf.dims[i];
      (*b->layout)[ndim + i] = step;
      step *= leaf.dims[i];
    }
  }
  view->buf = b->data;
  view->len = leaf.row_bytes;
  view->itemsize = PyDataType_ELSIZE(leaf.descr());
  view->readonly = b->writeable ? 0 : 1;
  view->format = (flags & PyBUF_FORMAT) != 0 ? const_cast<char*>(format) : nullptr;
  view->ndim = static_cast<int>(ndim);
  view->shape = (flags & PyBUF_ND) != 0 && ndim != 0 ? b->layout->data() : nullptr;
  view->strides = (flags & PyBUF_STRIDES) == PyBUF_STRIDES && ndim != 0
                      ? b->layout->data() + ndim
                      : nullptr;
  view->suboffsets = nullptr;
  view->internal = nullptr;
  ++b->exports;
  Py_INCREF(self);
  view->obj = self;
  return 0;
}

void ReleaseBuffer(PyObject* self, Py_buffer*) { --AsBuffer(self)->exports; }

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

bool CheckOpen(const BufferObject* buffer) {
  if (buffer->plan != nullptr) return true;
  RaiseEnded("Buffer", "Keep a copy: numpy.array(buffer)");
  return false;
}

bool IsBuffer(PyObject* object) { return Py_TYPE(object) == g_buffer_type; }
PyObject* NewBuffer() { return g_buffer_type->tp_alloc(g_buffer_type, 0); }

void OpenBuffer(BufferObject* b, const Plan& plan, const ActiveCall& call,
                const Leaf& leaf, char* data, bool writeable) {
  b->plan = &plan;
  b->call = &call;
  b->leaf = &leaf;
  b->data = data;
  b->writeable = writeable;
}

bool IsHeld(const BufferObject* b) {
  return b->exports != 0 || (b->array != nullptr && Py_REFCNT(b->array) > 1) ||
         (b->tensors != nullptr && (*b->tensors)->load() != 0) ||
         (b->interface_read && Py_REFCNT(b) > 1);
}

bool KeepBefore(BufferObject* b) {
  const int64_t bytes = b->leaf->row_bytes;
  if (b->writeable || b->call->on_gpu() || bytes > kWatchedBytes) return true;
  if (b->plan->buffers.Shares(b->leaf - b->plan->args.data())) return true;
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
  b->plan = nullptr;
  b->call = nullptr;
  const bool alone = Py_REFCNT(b) == 1 && !IsHeld(b);  // before the array goes
  if (b->array != nullptr) {
    if (Py_REFCNT(b->array) > 1 && b->leaf != nullptr) Disown(b->array, *b->leaf);
    Py_CLEAR(b->array);
  }
  b->leaf = nullptr;
  b->interface_read = false;
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
