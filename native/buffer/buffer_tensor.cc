// DLPack for Buffers.

#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <string_view>
#include <vector>

#include "base/code.h"
#include "buffer/buffer_object.h"
#include "buffer/dlpack.h"
#include "cuda/streams.h"
#include "plan/arrays.h"

namespace hostcall {
namespace {

/// One exported tensor and what it points to. If somebody keeps the tensor, it
/// outlives the call: the call then raises, but this object stays valid.
template <typename Managed>
struct Export {
  Managed managed;
  std::vector<int64_t> layout;  ///< shape, then strides
  std::vector<char> copy;       ///< the elements, if a copy was requested
  /// BufferObject::tensors, which counts this tensor; null for a copy.
  std::shared_ptr<std::atomic<int64_t>> count;
};

struct NamedType {
  std::string_view name;
  uint8_t code;
  uint8_t bits;
};
/// DLPack's codes for the dtypes of ml_dtypes, by name: NumPy has no kind for them.
constexpr NamedType kNamed[] = {{"bfloat16", 4, 16},
                                {"float8_e3m4", 7, 8},
                                {"float8_e4m3", 8, 8},
                                {"float8_e4m3b11fnuz", 9, 8},
                                {"float8_e4m3fn", 10, 8},
                                {"float8_e4m3fnuz", 11, 8},
                                {"float8_e5m2", 12, 8},
                                {"float8_e5m2fnuz", 13, 8},
                                {"float8_e8m0fnu", 14, 8},
                                {"float4_e2m1fn", 17, 4},
                                {"int2", 0, 2},
                                {"uint2", 1, 2},
                                {"int4", 0, 4},
                                {"uint4", 1, 4}};

/// DLPack's type of a leaf's elements. False with a Python error set if it has
/// none.
bool TypeOf(const Leaf& leaf, bool on_gpu, DLDataType* type) {
  PyArray_Descr* descr = leaf.descr();
  type->lanes = 1;
  type->bits = static_cast<uint8_t>(8 * PyDataType_ELSIZE(descr));
  if (descr->type_num < NPY_USERDEF) {
    constexpr std::string_view kKinds = "biufc";
    constexpr uint8_t kCodes[] = {6, 0, 1, 2, 5};
    const size_t kind = kKinds.find(descr->kind);
    if (kind != kKinds.npos) {
      type->code = kCodes[kind];
      return true;
    }
  }
  // By name, since some dtypes of ml_dtypes have the kind of NumPy's floats ('f').
  Ref name = Ref::Steal(PyObject_GetAttrString(leaf.dtype.get(), "name"));
  const char* text = name ? PyUnicode_AsUTF8(name.get()) : nullptr;
  if (text == nullptr) return false;
  for (const NamedType& named : kNamed) {
    if (named.name != text) continue;
    type->code = named.code;
    type->bits = named.bits;
    // DLPack packs small elements, as XLA does on a GPU. The host has each in a
    // byte.
    if (named.bits >= 8 || on_gpu) return true;
  }
  PyErr_Format(
      PyExc_BufferError,
      "hostcall: DLPack has no type for %s; use numpy.asarray" HOSTCALL_CODE(
          "hc-buffer"),
      text);
  return false;
}

/// The deleter of an exported tensor. May run on any thread, without the GIL.
template <typename Managed>
void Delete(Managed* managed) {
  auto* made = static_cast<Export<Managed>*>(managed->context);
  if (made->count) made->count->fetch_sub(1);
  delete made;
}

/// The name of a capsule with such a tensor.
constexpr const char* NameFor(const DLManagedTensor*) { return "dltensor"; }
constexpr const char* NameFor(const DLManagedTensorVersioned*) {
  return "dltensor_versioned";
}
/// Sets the version and flags, which the old structure does not have.
void Mark(DLManagedTensor&, uint64_t) {}
void Mark(DLManagedTensorVersioned& managed, uint64_t flags) {
  managed.major = 1;
  managed.minor =
      managed.tensor.dtype.code > 6 ? 1 : 0;  // 1.1 has the small floats
  managed.flags = flags;
}

/// A capsule with a tensor over the Buffer's memory or a copy of it; null with a
/// Python error set. Throws std::bad_alloc.
template <typename Managed>
PyObject* Capsule(BufferObject* b, const ActiveCall& call, DLDataType type,
                  bool copy) {
  const Leaf& leaf = *b->leaf;
  auto made = std::make_unique<Export<Managed>>();
  const size_t ndim = leaf.dims.size();
  made->layout.resize(2 * ndim);
  int64_t step = 1;
  for (size_t i = ndim; i-- > 0;) {
    made->layout[i] = leaf.dims[i];
    made->layout[ndim + i] = step;
    step *= leaf.dims[i];
  }
  void* data = b->data;
  if (copy) {
    made->copy.assign(b->data, b->data + leaf.row_bytes);
    data = made->copy.data();
  } else {
    const std::lock_guard<AttachedMutex> lock(b->mutex);
    if (b->tensors == nullptr) {
      b->tensors = new std::shared_ptr<std::atomic<int64_t>>(
          std::make_shared<std::atomic<int64_t>>(0));
    }
    made->count = *b->tensors;
  }
  const DLDevice device{call.on_gpu() ? kDLCUDA : kDLCPU,
                        call.on_gpu() ? call.device_ordinal : 0};
  made->managed.tensor = {leaf.count == 0 ? nullptr : data,
                          device,
                          static_cast<int32_t>(ndim),
                          type,
                          made->layout.data(),
                          made->layout.data() + ndim,
                          0};
  Mark(made->managed,
       (b->writeable || copy ? 0 : kDLReadOnly) | (copy ? kDLCopied : 0));
  made->managed.context = made.get();
  made->managed.deleter = &Delete<Managed>;
  PyObject* capsule =
      PyCapsule_New(&made->managed, NameFor(&made->managed), [](PyObject* self) {
        // A consumer renames the capsule when it takes the tensor over; the deleter
        // is then its business.
        const char* name = NameFor(static_cast<Managed*>(nullptr));
        if (!PyCapsule_IsValid(self, name)) return;
        auto* managed = static_cast<Managed*>(PyCapsule_GetPointer(self, name));
        managed->deleter(managed);
      });
  if (capsule == nullptr) return nullptr;
  // Counted last: every way out above destroys `made` without the deleter.
  if (made->count) made->count->fetch_add(1);
  made.release();  // the capsule owns it
  return capsule;
}

/// Waits for the work on XLA's stream, so that the consumer's stream comes after
/// it. On the same stream that holds anyway. False with a Python error set.
bool FinishWorkFor(void* theirs, void* ours) {
  if (ours == theirs) return true;
  try {
    GilRelease unlocked;  // the stream may wait for a callback that needs the GIL
    WaitForStream(ours);
    return true;
  } catch (const std::exception& error) {  // the guard has taken the GIL again
    PyErr_SetString(PyExc_BufferError, error.what());
    return false;
  }
}

/// `stream` is the one on which the consumer will work.
bool CheckStream(const ActiveCall& call, PyObject* stream) {
  void* ours = call.stream;
  // None stands for the legacy default stream, on a GPU.
  if (stream == Py_None) return !call.on_gpu() || FinishWorkFor(nullptr, ours);
  const long long number = PyLong_AsLongLong(stream);
  if (number == -1) return !PyErr_Occurred();  // the consumer wants no ordering
  if (!call.on_gpu()) {
    PyErr_SetString(
        PyExc_BufferError,
        "hostcall: this Buffer is CPU memory, which has no streams" HOSTCALL_CODE(
            "hc-buffer"));
    return false;
  }
  // 1 and 2 name the default streams, which XLA never uses.
  return FinishWorkFor(number <= 2 ? nullptr : reinterpret_cast<void*>(number),
                       ours);
}

}  // namespace

namespace {

/// ExportTensor, but throws std::bad_alloc.
PyObject* Exported(BufferObject* b, const ActiveCall& call, PyObject* const* args,
                   Py_ssize_t n, PyObject* names) {
  PyObject *stream = Py_None, *version = Py_None, *device = Py_None,
           *copy = Py_None;
  if (n != 0) {
    PyErr_SetString(PyExc_TypeError, "__dlpack__ takes keywords only");
    return nullptr;
  }
  const Py_ssize_t keywords = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  for (Py_ssize_t i = 0; i < keywords; ++i) {
    PyObject* name = PyTuple_GET_ITEM(names, i);
    if (PyUnicode_CompareWithASCIIString(name, "stream") == 0) {
      stream = args[i];
    } else if (PyUnicode_CompareWithASCIIString(name, "max_version") == 0) {
      version = args[i];
    } else if (PyUnicode_CompareWithASCIIString(name, "dl_device") == 0) {
      device = args[i];
    } else if (PyUnicode_CompareWithASCIIString(name, "copy") == 0) {
      copy = args[i];
    } else {
      PyErr_Format(PyExc_TypeError, "__dlpack__ has no keyword %U", name);
      return nullptr;
    }
  }
  const bool on_gpu = call.on_gpu();
  if (device != Py_None) {
    int type = 0, id = 0;
    if (!PyArg_ParseTuple(device, "ii", &type, &id)) return nullptr;
    const bool same =
        on_gpu ? type == kDLCUDA && id == call.device_ordinal : type == kDLCPU;
    if (!same) {
      PyErr_Format(
          PyExc_BufferError,
          "hostcall: the memory is on DLPack device (%d, %d), and can't be moved "
          "to (%d, %d): move the array that you create from it" HOSTCALL_CODE(
              "hc-buffer"),
          on_gpu ? 2 : 1, on_gpu ? call.device_ordinal : 0, type, id);
      return nullptr;
    }
  }
  if (copy == Py_True && on_gpu) {
    PyErr_SetString(
        PyExc_BufferError,
        "hostcall: GPU memory can't be copied here: copy the array that you create "
        "from it" HOSTCALL_CODE("hc-buffer"));
    return nullptr;
  }
  DLDataType type;
  if (!TypeOf(*b->leaf, on_gpu, &type) || !CheckStream(call, stream)) {
    return nullptr;
  }
  // WaitForStream released the GIL, and another thread may have ended the call.
  const Lease::Use still(b->lease);
  if (!CheckOpen(still)) return nullptr;
  if (!KeepBefore(b, call)) return nullptr;
  int major = 0, minor = 0;
  if (version != Py_None && !PyArg_ParseTuple(version, "ii", &major, &minor)) {
    return nullptr;
  }
  if (major >= 1) {
    return Capsule<DLManagedTensorVersioned>(b, call, type, copy == Py_True);
  }
  return Capsule<DLManagedTensor>(b, call, type, copy == Py_True);
}

}  // namespace

PyObject* ExportTensor(BufferObject* b, const ActiveCall& call,
                       PyObject* const* args, Py_ssize_t n, PyObject* names) {
  try {  // an exception must not cross the interpreter's frames above
    return Exported(b, call, args, n, names);
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
}

}  // namespace hostcall
