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
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "buffer/lease.h"
#include "plan/call_scope.h"
#include "plan/plan.h"

namespace hostcall {

/// The Python object `Buffer`. The leaf is not owned, and valid only during a use.
struct BufferObject {
  PyObject_HEAD Lease lease;         ///< of the call that lends the memory
  AttachedMutex mutex;               ///< guards array, tensors, before and layout
  const Leaf* leaf;                  ///< dtype and shape
  char* data;                        ///< the first element of the row, XLA's memory
  bool writeable;                    ///< it is an output
  std::atomic<bool> interface_read;  ///< __cuda_array_interface__ was read
  Tally exports;                     ///< unreleased, of the buffer protocol
  PyObject* array;  ///< what __array__ returns views of; owned, or null
  /// The number of living DLPack tensors, shared with them; null before the first.
  std::shared_ptr<std::atomic<int64_t>>* tensors;
  /// A copy of an input that somebody might write to; null or empty if there is
  /// none.
  std::vector<char>* before;
  /// Shape and strides for the buffer protocol, which points into it; null before
  /// use.
  std::vector<Py_ssize_t>* layout;
};

/// The Python object `ExecutionContext`.
struct ContextObject {
  PyObject_HEAD Lease lease;
};

/// Whether a Python object is a Buffer.
bool IsBuffer(PyObject* object);
/// New objects, closed; null with a Python error set.
PyObject* NewBuffer();
PyObject* NewContext();

inline BufferObject* AsBuffer(PyObject* object) {
  return reinterpret_cast<BufferObject*>(object);
}
inline ContextObject* AsContext(PyObject* object) {
  return reinterpret_cast<ContextObject*>(object);
}

/// Opens a Buffer over the row at `data`.
void OpenBuffer(BufferObject* buffer, const ActiveCall& call, const Leaf& leaf,
                char* data, bool writeable);
/// Copies the values of a small input that goes to a consumer of DLPack, since
/// every tensor of PyTorch can be written to, whatever the protocol says. False
/// with a Python error set.
bool KeepBefore(BufferObject* buffer, const ActiveCall& call);

// The following are for the call's thread, after the lease has ended.

/// Whether an input has been written to since KeepBefore; restores its values.
bool WasChanged(BufferObject* buffer);
/// Whether a view of the memory exists. Lets go of the array that `__array__` has
/// made, if nobody else holds it.
bool IsHeld(BufferObject* buffer);
/// Lets go of the memory; also ends the lease. True if nobody else holds the Buffer
/// or a view, so that it can be opened again for another call.
bool CloseBuffer(BufferObject* buffer);

/// Implements `__dlpack__` of an open Buffer, with its arguments.
PyObject* ExportTensor(BufferObject* buffer, const ActiveCall& call,
                       PyObject* const* args, Py_ssize_t n, PyObject* names);

/// Whether a use has begun before the end of the call; false with a Python error
/// set if not.
bool CheckOpen(const Lease::Use& use);

/// Adds the types to the module. False with a Python error set.
bool InitBuffers(PyObject* module);

/// Sets what the types take from Python: ExecutionStage.EXECUTE, and the errors
/// that they raise after the end of a call and for `stream` on a CPU.
void SetBufferNames(PyObject* stage, PyObject* ended_error, PyObject* stream_error);

}  // namespace hostcall
