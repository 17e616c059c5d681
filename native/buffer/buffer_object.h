// Python's `Buffer` and `ExecutionContext`: XLA's memory in a callback's
// hands.
//
// A Buffer is open as long as its call lasts. Whoever looks at the memory through
// it is counted, by each protocol in its way, so that at the end of the call, while
// the memory is still whole, a view that was kept is seen:
//
//   buffer protocol   exports that have not been released (memoryviews, and NumPy
//                     arrays made from them)
//   __array__         one array, made once and handed out again: somebody holds it
//                     (as the base of a view too)
//   DLPack            capsules and tensors whose deleter has not run
//   __cuda_array_     read, and the Buffer is still held: who reads it keeps the
//   interface__       Buffer, and nothing else
//
// To keep the Buffer itself is allowed: closed, it refuses everything.
//
// Threads. All of this happens with the GIL held, but for DLPack's deleter, which
// may run anywhere: its count is atomic, and lives as long as the last who needs
// it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "plan/call_scope.h"
#include "plan/plan.h"

namespace hostcall {

struct BufferObject {
  PyObject_HEAD const Plan* plan;  ///< null: closed
  const ActiveCall* call;          ///< whose memory it is
  const Leaf* leaf;
  char* data;
  bool writeable;
  bool interface_read;                             ///< __cuda_array_interface__
  Py_ssize_t exports;                              ///< of the buffer protocol
  PyObject* array;                                 ///< what __array__ gave, or null
  std::shared_ptr<std::atomic<int64_t>>* tensors;  ///< DLPack's, or null
  std::vector<char>*
      before;  ///< an input's values, where somebody might write to it
  std::vector<Py_ssize_t>* layout;  ///< shape and strides of the buffer protocol
};

struct ContextObject {
  PyObject_HEAD const ActiveCall* call;  ///< null: ended
};

bool IsBuffer(PyObject* object);
/// New and closed.
PyObject* NewBuffer();
PyObject* NewContext();

inline BufferObject* AsBuffer(PyObject* object) {
  return reinterpret_cast<BufferObject*>(object);
}

/// Opens a Buffer over the row at `data`.
void OpenBuffer(BufferObject* buffer, const Plan& plan, const ActiveCall& call,
                const Leaf& leaf, char* data, bool writeable);
/// Keeps the values of a small input that goes to a consumer of DLPack: PyTorch's
/// tensors can all be written, whatever the protocol says.
bool KeepBefore(BufferObject* buffer);
/// Whether it has been written to; puts the values right. For open Buffers.
bool WasChanged(BufferObject* buffer);

/// Whether somebody but the caller looks at the memory.
bool IsHeld(const BufferObject* buffer);
/// From now on it refuses everything. True: it can be opened again, since nobody
/// holds it.
bool CloseBuffer(BufferObject* buffer);

/// DLPack of an open Buffer, with the arguments of `__dlpack__`.
PyObject* ExportTensor(BufferObject* buffer, PyObject* const* args, Py_ssize_t n,
                       PyObject* names);

/// Makes the work of a consumer's stream come after what is on ours. False with a
/// Python error set. In cuda_handlers.cc: the driver is above this layer.
bool WaitForStream(void* ours, void* theirs);

/// Raises for a closed Buffer; false: it did.
bool CheckOpen(const BufferObject* buffer);

/// Gives the module its types. `names` has what they take from Python: the stage
/// that calls run in, and the errors they raise.
bool InitBuffers(PyObject* module);
void SetBufferNames(PyObject* stage, PyObject* ended_error, PyObject* stream_error);

}  // namespace hostcall
