// Python's `Buffer` and `ExecutionContext`: XLA's memory in the hands of a
// callback.
//
// A Buffer is open as long as its call lasts. Python can't take a view of memory
// back, so every view is counted, in a way that depends on its protocol. At the end
// of the call, while the memory is still whole, a view that was kept is thereby
// detected:
//
//   buffer protocol   exports that have not been released (memoryviews, and NumPy
//                     arrays made from them)
//   __array__         references to the one array that is made once and handed out
//                     again; views have it as their base
//   DLPack            capsules and tensors whose deleter has not run
//   __cuda_array_     it was read, and somebody still holds the Buffer: readers
//   interface__       keep the Buffer, and nothing else
//
// The Buffer itself may be kept: once it is closed, it refuses everything.
//
// Threads. The function may hand its Buffers to other threads. With a GIL, it
// guards all fields; only DLPack's deleter may run on any thread without it, so its
// count is atomic, and lives as long as its last user. Without a GIL:
//
//   * A Lease lets nobody begin to use a Buffer after the end of its call, and the
//     call's thread waits for those that have begun, which takes some microseconds.
//     From then on only the call's thread touches the fields, but for `exports`.
//   * Until then, `mutex` guards the fields that are made when first needed.
//   * The counts of references are merged, so that the call's thread can read them.
//
// The GIL is held in all functions.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "base/engine.h"
#include "base/free_threads.h"
#include "plan/call_scope.h"
#include "plan/plan.h"

namespace hostcall {

/// What a Python object may use of a call, until the call ends. A new one has
/// ended.
class Lease {
 public:
  /// Begins a call. Called while nobody else has the object.
  void Begin(const ActiveCall& call) { call_.store(&call, kOrder); }
  /// Ends it: no use begins afterwards, and none is under way.
  void End() {
    call_.store(nullptr, kOrder);
    // A use is short, and may need the interpreter. In a forked child, the threads
    // whose uses are counted do not exist.
    while (uses_.load() != 0 && !Engine::Get().forked()) {
      GilRelease unlocked;
      std::this_thread::sleep_for(std::chrono::microseconds(10));
    }
  }

  /// A use of the object, for the guard's life. It converts to false if the call
  /// has ended.
  class Use : NoCopy {
   public:
    explicit Use(Lease& lease) : lease_(lease) {
      lease.Count(1);
      call_ = lease.call_.load(kOrder);
      // At once: those who ask for an ended one must not keep its end waiting.
      if (call_ == nullptr) lease.Count(-1);
    }
    ~Use() {
      if (call_ != nullptr) lease_.Count(-1);
    }
    explicit operator bool() const { return call_ != nullptr; }
    const ActiveCall* operator->() const { return call_; }
    const ActiveCall& operator*() const { return *call_; }

   private:
    Lease& lease_;
    const ActiveCall* call_;
  };

 private:
  /// The GIL is held, or there is none. It may change hands during a use, which may
  /// run Python code.
  void Count(int n) {
    if (kFreeThreads) {
      uses_.fetch_add(n);
    } else {
      const int now = uses_.load(std::memory_order_relaxed);
      uses_.store(now + n, std::memory_order_relaxed);
    }
  }
  /// As in base/engine.h, at least one side sees the other: a use that missed the
  /// end is counted. The GIL needs no order.
  static constexpr auto kOrder =
      kFreeThreads ? std::memory_order_seq_cst : std::memory_order_relaxed;
  std::atomic<const ActiveCall*> call_{nullptr};  ///< not owned; null: ended
  std::atomic<int32_t> uses_{0};                  ///< under way
};

/// What a Python `Buffer` holds. The leaf is not owned, and valid only during a
/// use.
struct BufferObject {
  Lease lease;                 ///< of the call that lends the memory
  AttachedMutex mutex;         ///< guards array, tensors, before and layout
  const Leaf* leaf = nullptr;  ///< dtype and shape
  char* data = nullptr;        ///< the first element of the row, XLA's memory
  bool writeable = false;      ///< it is an output
  /// Whether __cuda_array_interface__ was read. Relaxed: the lease orders its reads
  /// and writes.
  std::atomic<bool> interface_read{false};
  Tally exports;              ///< unreleased, of the buffer protocol
  PyObject* array = nullptr;  ///< what __array__ returns views of; owned, or null
  /// The number of living DLPack tensors, shared with them; null before the first.
  /// A deleter releases and IsLent acquires, so what a consumer did with the memory
  /// comes before the call's end. An addition is relaxed: it happens during a use.
  std::shared_ptr<std::atomic<int64_t>> tensors;
  /// A copy of an input that somebody might write to; else empty.
  std::vector<char> before;
  /// Shape and strides for the buffer protocol, which points into it; empty before
  /// use.
  std::vector<Py_ssize_t> layout;

  /// Whether a use has begun before the end of the call; false with a Python error
  /// set if not.
  static bool Check(const Lease::Use& use);
};

/// What a Python `ExecutionContext` holds.
struct ContextObject {
  Lease lease;
  static bool Check(const Lease::Use& use);  ///< as a Buffer's
};

/// A new Python object with a T, closed; null with a Python error set.
template <typename T>
PyObject* New() {
  try {
    nanobind::object made = nanobind::inst_alloc(nanobind::type<T>());
    new (nanobind::inst_ptr<T>(made)) T();
    nanobind::inst_mark_ready(made);
    Merge(made.ptr());
    return made.release().ptr();
  } catch (nanobind::python_error& error) {
    error.restore();
    return nullptr;
  }
}
inline BufferObject* AsBuffer(PyObject* object) {
  return nanobind::inst_ptr<BufferObject>(object);
}

/// Copies the values of a small input that goes to a consumer of DLPack, since
/// every tensor of PyTorch can be written to, whatever the protocol says. Throws
/// std::bad_alloc.
void KeepBefore(BufferObject& buffer, const ActiveCall& call);

// The following are for the call's thread, after the lease has ended.

/// Whether an input has been written to since KeepBefore; restores its values.
bool WasChanged(BufferObject* buffer);
/// Whether a view of the memory of the Buffer `self` exists. Lets go of the array
/// that `__array__` has made, if nobody else holds it.
bool IsLent(PyObject* self);
/// Lets go of the memory. True if nobody else holds the Buffer
/// or a view, so that it can be opened again for another call.
bool CloseBuffer(PyObject* self);

/// Whether a Buffer is open, and the host can read its memory; false with a Python
/// error set.
bool OnHost(const Lease::Use& use);
/// The slots of the buffer protocol.
int GetBuffer(PyObject* self, Py_buffer* view, int flags);
void ReleaseBuffer(PyObject* self, Py_buffer* view);

/// Implements `__dlpack__`, with its arguments.
nanobind::object ExportTensor(BufferObject& buffer, std::optional<int64_t> stream,
                              std::optional<std::pair<int, int>> version,
                              std::optional<std::pair<int, int>> device,
                              std::optional<bool> copy);

/// Adds the types to the module.
void InitBuffers(nanobind::module_& m);

}  // namespace hostcall
