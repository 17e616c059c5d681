// The buffer protocol of Buffers.
//
// Every request is answered as NumPy answers it for an array of the same shape,
// dtype and writability, since consumers are tried with arrays: what isn't asked
// for is null, and whoever doesn't ask for a shape gets zero dimensions. (A
// consumer that finds dimensions reads the shape.) Only the type of what is raised
// differs: BufferError, as Python's documentation asks for, where NumPy raises
// ValueError.

#include <algorithm>
#include <mutex>
#include <new>
#include <string_view>
#include <vector>

#include "base/code.h"
#include "buffer/buffer_object.h"
#include "plan/arrays.h"

namespace hostcall {
namespace {

/// The letter of the struct module for a dtype, or NumPy's for complex numbers;
/// null if there is none.
const char* FormatOf(const PyArray_Descr* descr) {
  constexpr std::string_view kTypes = "?bBhHiIlLefdFD";
  static constexpr const char* kFormats[] = {"?", "b", "B", "h", "H", "i",  "I",
                                             "l", "L", "e", "f", "d", "Zf", "Zd"};
  if (descr->type_num >= NPY_USERDEF) return nullptr;  // it has letters too
  const size_t number = kTypes.find(descr->type);
  return number == kTypes.npos ? nullptr : kFormats[number];
}

/// Sets the Python error; returns what a slot returns then.
int Refuse(const char* text) {
  PyErr_SetString(PyExc_BufferError, text);
  return -1;
}

/// Whether a row-major array of this shape is column-major too.
bool IsColumnMajor(const Leaf& leaf) {
  const auto is_long = [](int64_t dim) { return dim != 1; };
  return leaf.count == 0 ||
         std::count_if(leaf.dims.begin(), leaf.dims.end(), is_long) <= 1;
}

/// The shape, then the strides of the row-major and of the column-major order. The
/// latter are used where both orders hold the same elements.
std::vector<Py_ssize_t> LayoutOf(const Leaf& leaf) {
  const size_t ndim = leaf.dims.size();
  std::vector<Py_ssize_t> layout(leaf.dims.begin(), leaf.dims.end());
  layout.resize(3 * ndim);
  const Py_ssize_t* shape = layout.data();
  Py_ssize_t* row_major = layout.data() + ndim;
  Py_ssize_t* column_major = layout.data() + 2 * ndim;
  Py_ssize_t step = PyDataType_ELSIZE(leaf.descr());
  for (size_t i = ndim; i-- > 0;) {  // the last axis is the innermost
    row_major[i] = step;
    step *= shape[i];
  }
  step = PyDataType_ELSIZE(leaf.descr());
  for (size_t i = 0; i < ndim; ++i) {  // the first one is
    column_major[i] = step;
    step *= shape[i];
  }
  return layout;
}

}  // namespace

bool OnHost(const Lease::Use& use) {
  if (!BufferObject::Check(use)) return false;
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
  // `Buffer.__new__(Buffer)` allocates one that nothing has made.
  if (!nanobind::inst_ready(self)) {
    PyErr_SetString(PyExc_TypeError, "hostcall: only hostcall makes Buffers");
    return -1;
  }
  BufferObject* b = AsBuffer(self);
  const Lease::Use use(b->lease);
  if (!OnHost(use)) return -1;
  const Leaf& leaf = *b->leaf;
  const auto asks = [flags](int flag) { return (flags & flag) == flag; };
  const char* format = asks(PyBUF_FORMAT) ? FormatOf(leaf.descr()) : nullptr;
  if (asks(PyBUF_FORMAT) && format == nullptr) {
    // NumPy then asks for __array__. A constant text, since NumPy comes here for
    // every array of such a dtype, and formatting would cost.
    return Refuse(
        "hostcall: Python's struct module has no letter for this "
        "Buffer's dtype, so the buffer protocol can't describe it; use "
        "numpy.asarray" HOSTCALL_CODE("hc-buffer"));
  }
  if (asks(PyBUF_WRITABLE) && !b->writeable) {
    return Refuse(
        "hostcall: this Buffer is an input, which can't be written "
        "to" HOSTCALL_CODE("hc-buffer"));
  }
  const bool column_major = asks(PyBUF_F_CONTIGUOUS);
  if (column_major && !IsColumnMajor(leaf)) {
    return Refuse(
        "hostcall: this Buffer is row-major, so it has no column-major "
        "view" HOSTCALL_CODE("hc-buffer"));
  }
  const size_t ndim = leaf.dims.size();
  // Exports point into the layout, so it is made once. All have the same one.
  const std::lock_guard<AttachedMutex> lock(b->mutex);
  try {
    if (b->layout.empty()) b->layout = LayoutOf(leaf);
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
    return -1;
  }
  Py_ssize_t* shape = b->layout.data();
  Py_ssize_t* strides = shape + (column_major ? 2 : 1) * ndim;
  view->buf = HostAddress(b->data);
  view->len = leaf.row_bytes;
  view->itemsize = PyDataType_ELSIZE(leaf.descr());
  view->readonly = b->writeable ? 0 : 1;
  view->format = const_cast<char*>(format);
  view->ndim = asks(PyBUF_ND) ? static_cast<int>(ndim) : 0;
  // A scalar has neither, even if they are asked for.
  view->shape = asks(PyBUF_ND) && ndim != 0 ? shape : nullptr;
  view->strides = asks(PyBUF_STRIDES) && ndim != 0 ? strides : nullptr;
  view->suboffsets = nullptr;
  view->internal = nullptr;
  b->exports.Add(1);
  Py_INCREF(self);
  view->obj = self;
  return 0;
}

void ReleaseBuffer(PyObject* self, Py_buffer*) { AsBuffer(self)->exports.Add(-1); }

}  // namespace hostcall
