// DLPack of a Buffer.

#include <cstring>
#include <memory>
#include <new>
#include <string_view>

#include "buffer/buffer_object.h"
#include "buffer/dlpack.h"
#include "plan/arrays.h"

namespace hostcall {
namespace {

/// What one exported tensor needs for its life, which may be longer than the call's
/// where somebody keeps it: then the call raises, but this stays sound.
template <typename Managed>
struct Export {
  Managed managed;
  std::vector<int64_t> layout;  // shape, then strides
  std::vector<char> copy;       // the elements, where a copy was asked for
  std::shared_ptr<std::atomic<int64_t>>
      count;  // of those that look at XLA's memory
};

struct NamedType {
  std::string_view name;
  uint8_t code;
  uint8_t bits;
};
/// What NumPy has no letter for, by ml_dtypes' names.
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
  // Some of ml_dtypes' call themselves floats ('f') too.
  Ref name = Ref::Steal(PyObject_GetAttrString(leaf.dtype.get(), "name"));
  const char* text = name ? PyUnicode_AsUTF8(name.get()) : nullptr;
  if (text == nullptr) return false;
  for (const NamedType& named : kNamed) {
    if (named.name != text) continue;
    type->code = named.code;
    type->bits = named.bits;
    // In DLPack small elements are packed. XLA has them so, the host a byte each.
    if (named.bits >= 8 || on_gpu) return true;
  }
  PyErr_Format(PyExc_BufferError,
               "hostcall: DLPack can't say that these are %s; use numpy.asarray",
               text);
  return false;
}

template <typename Managed>
void Delete(Managed* managed) {
  auto* made = static_cast<Export<Managed>*>(managed->context);
  if (made->count) made->count->fetch_sub(1);
  delete made;
}

constexpr const char* NameFor(const DLManagedTensor*) { return "dltensor"; }
constexpr const char* NameFor(const DLManagedTensorVersioned*) {
  return "dltensor_versioned";
}
void Mark(DLManagedTensor&, uint64_t) {}
void Mark(DLManagedTensorVersioned& managed, uint64_t flags) {
  managed.major = 1;
  managed.minor =
      managed.tensor.dtype.code > 6 ? 1 : 0;  // 1.1 has the small floats
  managed.flags = flags;
}

template <typename Managed>
PyObject* Capsule(BufferObject* b, DLDataType type, bool copy) {
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
    if (b->tensors == nullptr) {
      b->tensors = new std::shared_ptr<std::atomic<int64_t>>(
          std::make_shared<std::atomic<int64_t>>(0));
    }
    made->count = *b->tensors;
  }
  const DLDevice device{b->call->on_gpu() ? kDLCUDA : kDLCPU,
                        b->call->on_gpu() ? b->call->device_ordinal : 0};
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
        // Consumers rename what they take over.
        const char* name = NameFor(static_cast<Managed*>(nullptr));
        if (!PyCapsule_IsValid(self, name)) return;
        auto* managed = static_cast<Managed*>(PyCapsule_GetPointer(self, name));
        managed->deleter(managed);
      });
  if (capsule == nullptr) return nullptr;
  if (made->count) made->count->fetch_add(1);
  made.release();
  return capsule;
}

/// The stream on which the consumer will work. On ours nothing has to wait.
bool CheckStream(const BufferObject* b, PyObject* stream) {
  void* ours = b->call->stream;
  // None stands for the legacy default stream, on a GPU.
  if (stream == Py_None) return !b->call->on_gpu() || WaitForStream(ours, nullptr);
  const long long number = PyLong_AsLongLong(stream);
  if (number == -1) return !PyErr_Occurred();
  if (!b->call->on_gpu()) {
    PyErr_SetString(
        PyExc_BufferError,
        "hostcall: this Buffer is the CPU's memory, which has no streams");
    return false;
  }
  // 1 and 2 name the default streams, which XLA never uses.
  return WaitForStream(ours,
                       number <= 2 ? nullptr : reinterpret_cast<void*>(number));
}

}  // namespace

namespace {

PyObject* Exported(BufferObject* b, PyObject* const* args, Py_ssize_t n,
                   PyObject* names) {
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
  const bool on_gpu = b->call->on_gpu();
  if (device != Py_None) {
    int type = 0, id = 0;
    if (!PyArg_ParseTuple(device, "ii", &type, &id)) return nullptr;
    const bool same =
        on_gpu ? type == kDLCUDA && id == b->call->device_ordinal : type == kDLCPU;
    if (!same) {
      PyErr_Format(
          PyExc_BufferError,
          "hostcall: the memory is on DLPack's device (%d, %d), and does not "
          "move to (%d, %d): move what you make of it",
          on_gpu ? 2 : 1, on_gpu ? b->call->device_ordinal : 0, type, id);
      return nullptr;
    }
  }
  if (copy == Py_True && on_gpu) {
    PyErr_SetString(
        PyExc_BufferError,
        "hostcall: no copies of a GPU's memory: copy what you make of it");
    return nullptr;
  }
  DLDataType type;
  if (!TypeOf(*b->leaf, on_gpu, &type) || !CheckStream(b, stream)) return nullptr;
  if (!CheckOpen(b)) return nullptr;  // while the GIL was free, by another thread
  if (!KeepBefore(b)) return nullptr;
  int major = 0, minor = 0;
  if (version != Py_None && !PyArg_ParseTuple(version, "ii", &major, &minor)) {
    return nullptr;
  }
  if (major >= 1) {
    return Capsule<DLManagedTensorVersioned>(b, type, copy == Py_True);
  }
  return Capsule<DLManagedTensor>(b, type, copy == Py_True);
}

}  // namespace

PyObject* ExportTensor(BufferObject* b, PyObject* const* args, Py_ssize_t n,
                       PyObject* names) {
  try {  // above are the interpreter's frames, which an exception must not cross
    return Exported(b, args, n, names);
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
}

}  // namespace hostcall
