// DLPack for Buffers.

#include <nanobind/ndarray.h>

#include <exception>
#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

#include "base/code.h"
#include "buffer/buffer_object.h"
#include "cuda/cuda_driver.h"

namespace nb = nanobind;

namespace hostcall {
namespace {

namespace dlpack = nanobind::dlpack;
constexpr int kCpu = 1, kCuda = 2;  // types of devices
constexpr uint64_t kReadOnly = 1, kCopied = 2;

// DLPack's structures, as its specification (version 1.1) lays them out.

/// The structure before version 1. It can't say that the memory is read-only.
struct Managed {
  dlpack::dltensor tensor;
  void* context;
  void (*deleter)(Managed*);
};
/// The structure from version 1 on.
struct VersionedManaged {
  uint32_t major, minor;
  void* context;
  void (*deleter)(VersionedManaged*);
  uint64_t flags;
  dlpack::dltensor tensor;
};

/// One exported tensor and what it points to. If somebody keeps the tensor, it
/// outlives the call: the call then raises, but this object stays valid. It may be
/// destroyed on any thread, without the GIL.
struct Export {
  ~Export() {
    if (count) count->fetch_sub(1, std::memory_order_release);
  }
  Managed managed;              ///< either this is used,
  VersionedManaged versioned;   ///< or this
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

/// DLPack's type of a leaf's elements.
dlpack::dtype TypeOf(const Leaf& leaf, bool on_gpu) {
  PyArray_Descr* descr = leaf.descr();
  if (descr->type_num < NPY_USERDEF) {
    constexpr std::string_view kKinds = "biufc";
    constexpr uint8_t kCodes[] = {6, 0, 1, 2, 5};
    const size_t kind = kKinds.find(descr->kind);
    if (kind != kKinds.npos) {
      return {kCodes[kind], static_cast<uint8_t>(8 * PyDataType_ELSIZE(descr)), 1};
    }
  }
  // By name, since some dtypes of ml_dtypes have the kind of NumPy's floats ('f').
  const nb::object name =
      OrPark([&] { return nb::object(nb::handle(leaf.dtype.get()).attr("name")); });
  const auto text = nb::cast<const char*>(name);
  for (const NamedType& named : kNamed) {
    // DLPack packs small elements, as XLA does on a GPU. The host has each in a
    // byte.
    if (named.name == text && (named.bits >= 8 || on_gpu)) {
      return {named.code, named.bits, 1};
    }
  }
  PyErr_Format(
      PyExc_BufferError,
      "hostcall: DLPack has no type for %s; use numpy.asarray" HOSTCALL_CODE(
          "hc-buffer"),
      text);
  throw nb::python_error();
}

/// A tensor over the Buffer's memory, or over a copy of it.
std::unique_ptr<Export> MakeExport(BufferObject& b, const ActiveCall& call,
                                   dlpack::dtype type, bool copy) {
  const Leaf& leaf = *b.leaf;
  auto tensor_export = std::make_unique<Export>();
  const size_t ndim = leaf.dims.size();
  tensor_export->layout.resize(2 * ndim);
  int64_t step = 1;
  for (size_t i = ndim; i-- > 0;) {
    tensor_export->layout[i] = leaf.dims[i];
    tensor_export->layout[ndim + i] = step;
    step *= leaf.dims[i];
  }
  void* data = b.data;
  if (copy) {
    tensor_export->copy.assign(b.data, b.data + leaf.row_bytes);
    data = tensor_export->copy.data();
  } else {
    const std::lock_guard<AttachedMutex> lock(b.mutex);
    if (!b.tensors) b.tensors = std::make_shared<std::atomic<int64_t>>(0);
    tensor_export->count = b.tensors;
    tensor_export->count->fetch_add(1, std::memory_order_relaxed);
  }
  const dlpack::device device{call.on_gpu() ? kCuda : kCpu,
                              call.on_gpu() ? call.device_ordinal : 0};
  dlpack::dltensor tensor{};
  tensor.data = leaf.count == 0 ? nullptr : data;
  tensor.device = device;
  tensor.ndim = static_cast<int32_t>(ndim);
  tensor.dtype = type;
  tensor.shape = tensor_export->layout.data();
  tensor.strides = tensor.shape + ndim;
  tensor.byte_offset = 0;
  const auto destroy = [](auto* managed) {
    delete static_cast<Export*>(managed->context);
  };
  // Both forms, as the consumer's choice is known only to the caller.
  Managed& managed = tensor_export->managed;
  managed.tensor = tensor;
  managed.context = tensor_export.get();
  managed.deleter = destroy;
  VersionedManaged& versioned = tensor_export->versioned;
  versioned.major = 1;
  versioned.minor = type.code > 6 ? 1 : 0;  // 1.1 has the small floats
  versioned.context = tensor_export.get();
  versioned.deleter = destroy;
  versioned.flags = kCopied;
  if (!copy) versioned.flags = b.writeable ? 0 : kReadOnly;
  versioned.tensor = tensor;
  return tensor_export;
}

/// A capsule that owns the tensor.
nb::object Capsule(std::unique_ptr<Export> tensor_export, bool versioned) {
  void* managed = &tensor_export->managed;
  if (versioned) managed = &tensor_export->versioned;
  nb::object capsule = nb::steal(PyCapsule_New(
      managed, versioned ? "dltensor_versioned" : "dltensor", [](PyObject* self) {
        // A consumer renames the capsule when it takes the tensor over; the deleter
        // is then its business.
        if (!PyCapsule_IsValid(self, "dltensor") &&
            !PyCapsule_IsValid(self, "dltensor_versioned")) {
          return;
        }
        delete static_cast<Export*>(PyCapsule_GetContext(self));
      }));
  if (!capsule.is_valid() ||
      PyCapsule_SetContext(capsule.ptr(), tensor_export.release()) != 0) {
    throw nb::python_error();
  }
  return capsule;
}

/// Lets the consumer's work come after what is on XLA's stream now. `stream` is the
/// one on which the consumer will work; null stands for the legacy default stream,
/// on a GPU.
void FinishWorkFor(std::optional<int64_t> stream, const ActiveCall& call) {
  const int64_t number = stream.value_or(0);
  if (number == -1 || (!stream && !call.on_gpu())) return;  // no ordering is wanted
  if (!call.on_gpu()) {
    throw nb::buffer_error(
        "hostcall: this Buffer is CPU memory, which has no streams" HOSTCALL_CODE(
            "hc-buffer"));
  }
  // 1 and 2 name the default streams, which XLA never uses.
  void* theirs = number <= 2 ? nullptr : reinterpret_cast<void*>(number);
  if (theirs == call.stream) return;  // it is ordered anyway
  try {
    GilRelease unlocked;  // the stream may wait for a callback that needs the GIL
    const auto on = static_cast<CudaStream>(call.stream);
    const ScopedContext current(on);
    Driver().Synchronize(on);
  } catch (const std::exception& error) {  // the guard has taken the GIL again
    throw nb::buffer_error(error.what());
  }
}

}  // namespace

nb::object ExportTensor(BufferObject& b, std::optional<int64_t> stream,
                        std::optional<std::pair<int, int>> version,
                        std::optional<std::pair<int, int>> device,
                        std::optional<bool> copy) {
  const Lease::Use use(b.lease);
  if (!BufferObject::Check(use)) throw nb::python_error();
  const bool on_gpu = use->on_gpu();
  const int own_type = on_gpu ? kCuda : kCpu;
  const int own_number = on_gpu ? use->device_ordinal : 0;
  if (device) {
    const auto [type, number] = *device;
    // There is one CPU, whatever number the consumer has for it.
    const bool is_own = type == own_type && (!on_gpu || number == own_number);
    if (!is_own) {
      PyErr_Format(
          PyExc_BufferError,
          "hostcall: the memory is on DLPack device (%d, %d), and can't be moved "
          "to (%d, %d): move the array that you create from it" HOSTCALL_CODE(
              "hc-buffer"),
          own_type, own_number, type, number);
      throw nb::python_error();
    }
  }
  const bool copies = copy.value_or(false);
  if (copies && on_gpu) {
    throw nb::buffer_error(
        "hostcall: GPU memory can't be copied here: copy the array that you create "
        "from it" HOSTCALL_CODE("hc-buffer"));
  }
  const dlpack::dtype type = TypeOf(*b.leaf, on_gpu);
  FinishWorkFor(stream, *use);
  // It may have released the GIL, and another thread may have ended the call.
  const Lease::Use use_after(b.lease);
  if (!BufferObject::Check(use_after)) throw nb::python_error();
  KeepBefore(b, *use);
  return Capsule(MakeExport(b, *use, type, copies), version && version->first >= 1);
}

}  // namespace hostcall
