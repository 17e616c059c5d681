// The buffer protocol of Buffers.

#include <mutex>
#include <new>
#include <vector>

#include "base/code.h"
#include "buffer/buffer_object.h"
#include "buffer/buffer_types.h"

namespace hostcall {
namespace {

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

}  // namespace

bool OnHost(const Lease::Use& use) {
  if (!CheckOpen(use)) return false;
  if (!use->on_gpu()) return true;
  PyErr_SetString(
      PyExc_TypeError,
      "hostcall: this Buffer is GPU memory, which NumPy can't read. "
      "Use __cuda_array_interface__ (cupy.asarray, numba.cuda) or DLPack "
      "(torch.from_dlpack), on ctx.stream" HOSTCALL_CODE("hc-buffer"));
  return false;
}

int GetBuffer(PyObject* self, Py_buffer* view, int flags) {
  view->obj = nullptr;
  BufferObject* b = AsBuffer(self);
  const Lease::Use use(b->lease);
  if (!OnHost(use)) return -1;
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
  const std::lock_guard<AttachedMutex> lock(b->mutex);
  if (b->exports.value() == 0) {
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
  b->exports.Add(1);
  Py_INCREF(self);
  view->obj = self;
  return 0;
}

void ReleaseBuffer(PyObject* self, Py_buffer*) { AsBuffer(self)->exports.Add(-1); }

}  // namespace hostcall
