#include "buffer/buffer_object.h"

#include <cstring>
#include <mutex>

#include "base/bytes.h"
#include "base/code.h"
#include "cuda/cuda_driver.h"
#include "plan/arrays.h"

namespace nb = nanobind;

namespace hostcall {
namespace {

/// Whether a call goes on; else sets the error for a `what` (Buffer or context)
/// that is used after its call. `instead` says what to do.
bool IsOpen(const Lease::Use& use, const char* what, const char* instead) {
  if (use) return true;
  PyErr_Format(HookOf(Hook::kEndedError),
               "hostcall: this %s belongs to a call that has ended; its memory is "
               "XLA's again. %s",
               what, instead);
  return false;
}

/// What a method of the object returns. Python may end the thread in there, and
/// nanobind's frames expect no such exception (base/guards.h).
template <typename... Arguments>
nb::object Asked(nb::handle object, const char* method, Arguments&&... arguments) {
  return OrPark([&] { return object.attr(method)(arguments...); });
}

/// An attribute or method of a T: `get(T, call)`, if the call has not ended.
template <typename T, typename Get>
auto During(Get get) {
  return [get](T& self) {
    const Lease::Use use(self.lease);
    if (!T::Check(use)) throw nb::python_error();
    // It may run Python code: the text of a dtype, or a garbage collection.
    return OrPark([&] { return get(self, *use); });
  };
}

/// The jax.Device that runs the program of the call. Python code answers, so it is
/// asked after the use.
template <typename T>
nb::object DeviceOf(T& self) {
  const auto [hooks, ordinal] = During<T>([](T&, const ActiveCall& call) {
    return std::pair(nb::borrow(call.plan->hooks.get()), call.device_ordinal);
  })(self);
  return Asked(hooks, "device_at", ordinal);
}

/// The address of XLA's stream; throws on a CPU.
uintptr_t StreamOfGpu(ContextObject&, const ActiveCall& call) {
  if (!call.on_gpu()) {
    PyErr_SetString(HookOf(Hook::kStreamError),
                    "XLA FFI GPU context is not available");
    throw nb::python_error();
  }
  return reinterpret_cast<uintptr_t>(call.stream);
}

/// The shape of one row.
nb::object ShapeOf(const Leaf& leaf) { return nb::tuple(nb::cast(leaf.dims)); }

/// The bytes of all elements, as the device has them.
int64_t BytesOf(const BufferObject& b, const ActiveCall& call) {
  // Small elements are packed on a GPU; the host sees an unpacked copy.
  const bool packed = call.on_gpu() && b.leaf->bits != 0;
  return packed ? (b.leaf->count * b.leaf->bits + 7) / 8 : b.leaf->row_bytes;
}

/// `__cuda_array_interface__`: the memory of a GPU, and the stream to work on.
nb::dict CudaInterface(BufferObject& b, const ActiveCall& call) {
  if (!call.on_gpu()) {
    throw nb::attribute_error(
        "hostcall: this Buffer is CPU memory, which has no "
        "__cuda_array_interface__: use numpy.asarray or DLPack" HOSTCALL_CODE(
            "hc-buffer"));
  }
  if (b.leaf->bits != 0) {
    throw nb::attribute_error(
        "hostcall: __cuda_array_interface__ can't describe elements smaller than a "
        "byte" HOSTCALL_CODE("hc-buffer"));
  }
  nb::dict interface;
  interface["shape"] = ShapeOf(*b.leaf);
  interface["typestr"] = nb::handle(b.leaf->dtype.get()).attr("str");
  const char* data = b.leaf->count == 0 ? nullptr : b.data;
  interface["data"] =
      nb::make_tuple(reinterpret_cast<uintptr_t>(data), !b.writeable);
  interface["strides"] = nb::none();
  interface["version"] = 3;
  b.interface_read.store(true, std::memory_order_relaxed);
  // Who reads a stream here waits for it (CuPy does), which ends a recording. There
  // it is None: the function works on the context's stream, and need not wait.
  interface["stream"] = nb::none();
  // The interface forbids 0; the legacy default stream is called 1.
  const auto stream = static_cast<CudaStream>(call.stream);
  const ScopedContext current(stream);
  if (!Driver().IsCaptured(stream)) {
    interface["stream"] =
        stream == nullptr ? 1 : reinterpret_cast<uintptr_t>(stream);
  }
  return interface;
}

/// A new view of the Buffer's one array. Each reader gets a view, and may change
/// its shape and flags. It holds a reference to the array, which is how IsLent
/// counts it.
nb::object ViewOf(BufferObject& b) {
  const Lease::Use use(b.lease);
  if (!OnHost(use)) throw nb::python_error();
  // By whoever comes first; a second one, destroyed without the lock.
  Ref array, surplus;
  {
    const std::lock_guard<AttachedMutex> lock(b.mutex);
    array = Ref::Borrow(b.array);
  }
  if (!array) {
    array = LentArray(*b.leaf, b.data, b.writeable);
    if (!array) throw nb::python_error();
    const std::lock_guard<AttachedMutex> lock(b.mutex);
    if (b.array == nullptr) {
      b.array = Ref::Borrow(array.get()).release();
    } else {  // only views of the one array are counted
      surplus = std::exchange(array, Ref::Borrow(b.array));
    }
  }
  auto* numpy_array = reinterpret_cast<PyArrayObject*>(array.get());
  nb::object view = nb::steal(PyArray_View(numpy_array, nullptr, nullptr));
  if (!view.is_valid()) throw nb::python_error();
  // Else it might be freed long after its last reference has gone, by this thread.
  Merge(view.ptr());
  return view;
}

/// `__array__`, with its arguments.
nb::object ToArray(BufferObject& b, nb::object dtype, nb::object copy) {
  nb::object array = ViewOf(b);
  if (dtype.is_none() && copy.is_none()) return array;
  return Asked(array, "__array__", dtype, nb::arg("copy") = copy);
}

/// `__repr__`, which also works after the call.
nb::str TextOf(BufferObject& b) {
  nb::object dtype, shape;
  {
    const Lease::Use use(b.lease);
    if (!use) return nb::str("<Buffer of a call that ended>");
    shape = ShapeOf(*b.leaf);
    dtype = nb::borrow(b.leaf->dtype.get());
  }
  const char* access = b.writeable ? "writeable" : "read-only";
  return nb::steal<nb::str>(OrPark([&] {
    return PyUnicode_FromFormat("<Buffer %S%S, %s>", dtype.ptr(), shape.ptr(),
                                access);
  }));
}

void InitBuffer(nb::module_& m) {
  static PyType_Slot slots[] = {
      {Py_bf_getbuffer, reinterpret_cast<void*>(&GetBuffer)},
      {Py_bf_releasebuffer, reinterpret_cast<void*>(&ReleaseBuffer)},
      {0, nullptr}};
  using B = BufferObject&;
  using Call = const ActiveCall&;
  nb::class_<BufferObject> type(
      m, "Buffer", nb::type_slots(slots), nb::is_final(),
      "An array of XLA, for as long as its callback runs.\n\n"
      "Read it with numpy.asarray, as a memoryview, with DLPack "
      "(torch.from_dlpack), on a GPU with __cuda_array_interface__; write to "
      "an output in the same ways (numpy.asarray(out)[...] = values). A view "
      "that is kept after the call is an error.");
  const auto add = [&type](const char* name, const char* doc, auto get) {
    type.def_prop_ro(name, During<BufferObject>(get), doc);
  };
  add("shape", "Sizes, as a tuple.", [](B b, Call) { return ShapeOf(*b.leaf); });
  add("dtype", "NumPy's dtype of the elements.",
      [](B b, Call) { return nb::borrow(b.leaf->dtype.get()); });
  add("ndim", "Number of dimensions.",
      [](B b, Call) { return b.leaf->dims.size(); });
  add("size", "Number of elements.", [](B b, Call) { return b.leaf->count; });
  add("nbytes", "Bytes of all elements.", &BytesOf);
  add("writeable", "True for outputs.", [](B b, Call) { return b.writeable; });
  add("ptr", "Address of the first element, row-major.",
      [](B b, Call) { return reinterpret_cast<uintptr_t>(b.data); });
  add("__cuda_array_interface__",
      "On a GPU: version 3, with the stream to work on.", &CudaInterface);
  type.def_prop_ro("device", &DeviceOf<BufferObject>,
                   "The jax.Device whose memory it is.")
      .def("__array__", &ToArray, nb::arg("dtype") = nb::none(),
           nb::arg("copy") = nb::none())
      .def("__dlpack__", &ExportTensor, nb::kw_only(),
           nb::arg("stream") = nb::none(), nb::arg("max_version") = nb::none(),
           nb::arg("dl_device") = nb::none(), nb::arg("copy") = nb::none())
      .def("__dlpack_device__", During<BufferObject>([](B, Call call) {
             return std::pair(call.on_gpu() ? 2 : 1,
                              call.on_gpu() ? call.device_ordinal : 0);
           }),
           "(device type, device number)")
      .def("__repr__", &TextOf)
      .attr("__module__") = "hostcall";
}

}  // namespace

void KeepBefore(BufferObject& b, const ActiveCall& call) {
  const int64_t bytes = b.leaf->row_bytes;
  if (b.writeable || call.on_gpu() || bytes > kWatchedBytes) return;
  if (call.plan->kind->IsShared(b.leaf - call.plan->args.data())) return;
  const std::lock_guard<AttachedMutex> lock(b.mutex);
  if (b.before.empty()) b.before.assign(b.data, b.data + bytes);
}

bool WasChanged(BufferObject* b) {
  if (b->before.empty()) return false;
  const bool is_unchanged =
      std::memcmp(b->data, b->before.data(), b->before.size()) == 0;
  if (!is_unchanged) CopyBytes(b->data, b->before.data(), b->before.size());
  b->before.clear();
  return !is_unchanged;
}

bool IsLent(PyObject* self) {
  BufferObject* b = AsBuffer(self);
  // One line for each protocol, as in the table at the top of the header. The array
  // first, since asking for it lets go of it.
  if (IsHeld(b->array)) return true;
  if (b->exports.value() != 0) return true;
  if (b->tensors && b->tensors->load(std::memory_order_acquire) != 0) return true;
  const bool was_read = b->interface_read.load(std::memory_order_relaxed);
  return was_read && IsHeldElsewhere(self);
}

bool CloseBuffer(PyObject* self) {
  BufferObject* b = AsBuffer(self);
  // IsLent first: it lets go of the array.
  const bool is_lent = IsLent(self);
  const bool alone = !is_lent && !IsHeldElsewhere(self);
  if (b->array != nullptr) {  // somebody holds it
    if (b->leaf != nullptr) Disown(b->array, *b->leaf);
    Py_CLEAR(b->array);
  }
  b->leaf = nullptr;
  b->interface_read.store(false, std::memory_order_relaxed);
  return alone;
}

bool BufferObject::Check(const Lease::Use& use) {
  return IsOpen(use, "Buffer", "Keep a copy: numpy.array(buffer)");
}
bool ContextObject::Check(const Lease::Use& use) {
  return IsOpen(use, "context", "Take what you need during the call.");
}

void InitBuffers(nb::module_& m) {
  InitBuffer(m);
  using C = ContextObject;
  using Call = const ActiveCall&;
  nb::class_<ContextObject>(
      m, "ExecutionContext", nb::is_final(),
      "What a buffer callback can ask about the call it is in.\n\n"
      "Attributes:\n"
      "    stage: ExecutionStage.EXECUTE.\n"
      "    stream: on a GPU the address of XLA's stream, on which to work.\n"
      "        On a CPU it raises JaxRuntimeError (`hc.current().stream` is\n"
      "        None there).\n"
      "    device: the jax.Device that runs the program.\n"
      "    run: XLA's number of this execution; -1 for an eager call.")
      .def_prop_ro("stage", During<C>([](C&, Call) {
                     return nb::borrow(HookOf(Hook::kStage));
                   }),
                   "ExecutionStage.EXECUTE.")
      .def_prop_ro("stream", During<C>(&StreamOfGpu),
                   "On a GPU the address of XLA's stream (a CUstream), on which to "
                   "work. Raises jax.errors.JaxRuntimeError on a CPU.")
      .def_prop_ro("device", &DeviceOf<ContextObject>,
                   "The jax.Device that runs the program.")
      .def_prop_ro("run", During<C>([](C&, Call call) { return call.run; }),
                   "XLA's number of this execution; -1 for an eager call.")
      // What cuda.core, CuPy and others ask an object for whose stream they shall
      // use: the protocol's version, and the address.
      .def(
          "__cuda_stream__", During<C>([](C& context, Call call) {
            return std::pair(0, StreamOfGpu(context, call));
          }),
          "(0, stream): cupy.cuda.Stream.from_external(ctx) works on XLA's stream.")
      .attr("__module__") = "hostcall";
}

}  // namespace hostcall
