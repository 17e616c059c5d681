// NumPy arrays over one row of XLA's buffers: owned by the function, or lent to it.
//
// Owned. Each array is NumPy's own memory, filled before the call. The function may
// keep it, write to it, or hand it to a thread. If the function has not kept an
// array (ours is the only reference, it has no weak reference, and its fields are
// as they were made), it is filled again for the next call: nobody can tell the
// difference.
//
// Lent. Each array is a view of XLA's memory, which XLA reuses when the handler
// returns. Hazards:
//   * A write to an input. The writeable flag is off. NumPy refuses to switch it
//     on: the array does not own its memory, and its base is not an array and
//     exports no writable buffer.
//   * An escape. A derived view, memoryview, DLPack capsule or tensor holds a
//     reference to the array. So an array that does not go when we drop ours after
//     the call is an escape, and an error, while the memory is still whole.
//   * What holds the array though nobody can reach it: the frames of a failed
//     function's traceback, a reference cycle, XLA's list of dead arrays. All of
//     that is released before an array counts as an escape (AllReturned).
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "plan/plan.h"

namespace hostcall {

/// Copies of at least this many bytes release the GIL.
constexpr int64_t kReleaseBytes = 1 << 18;
/// Arrays of more bytes are not kept for the next call: they would hold memory for
/// ever.
constexpr int64_t kSpareBytes = 1 << 23;
/// Inputs up to this many bytes are copied before they go to a consumer that could
/// write to them (KeepBefore in buffer_object.h).
constexpr int64_t kWatchedBytes = 1 << 16;
/// Results up to this many bytes are zeroed before they are lent for writing.
/// Clearing larger ones would cost as much as writing them.
constexpr int64_t kZeroBytes = 4096;

/// Whether nobody could tell this array from a new one.
bool AsMade(PyObject* object, const Leaf& leaf);

/// Returns an array that the function will own, with a copy of the row at `data`.
/// Reuses `spare` if it is not null. Null with a Python error set.
Ref OwnedArray(const Leaf& leaf, const char* data, Ref spare = Ref());

/// What the function gets for an array. Null with a Python error set, also for
/// null.
inline Ref Converted(const Leaf& leaf, Ref array) {
  if (leaf.convert) return Call(leaf.convert.get(), array);
  return array;
}

/// Returns an array for many rows, with the axes of `grid` in front, whose memory
/// is not set. Null with a Python error set.
Ref ArrayOfRows(const Leaf& leaf, const std::vector<int64_t>& grid);

/// `data`, or an address that nobody reads from if it is null: XLA before jaxlib
/// 0.10 gives a constant without elements no memory. For a null pointer NumPy would
/// allocate some, which is writeable and the array's own, so that Disown must not
/// replace it.
char* HostAddress(char* data);

/// Returns an array over XLA's memory at `data`, which must outlive it, or Disown
/// is needed. Its reference count is merged. Null with a Python error set.
Ref LentArray(const Leaf& leaf, char* data, bool writeable);

/// Points an escaped array at its own copy of the values, so that at least the
/// array itself stays safe to touch. Views of it still point at XLA's memory.
/// Without memory for a copy, nothing changes.
void Disown(PyObject* array, const Leaf& leaf);

/// Whether anybody but the caller holds an array that LentArray made, and that the
/// caller still has a reference to. If not, the array is gone afterwards, and
/// `array` is null.
inline bool IsHeld(PyObject*& array) {
  if (array != nullptr && DropIfLast(array)) array = nullptr;
  return array != nullptr;
}

/// Called after a call, whether or not a Python error is set. `is_held(leaf)` tells
/// whether somebody holds a view of a leaf's memory: the results count from 0, and
/// the arguments from the number of results. If there are any:
///
///   1. The plan's on_view_left releases what nobody can reach any more: the frames
///      of an error, XLA's list of dead arrays, reference cycles. It does so in
///      steps, as long as some view is held, since the last ones cost much.
///   2. If some view is held after all of them, on_escape raises for it.
///
/// Returns true if nothing is held; an error that was set is then set again.
/// Otherwise returns false with the new error set.
bool AllReturned(const Plan& plan, const std::function<bool(size_t leaf)>& is_held);

/// Sets the Python error for a result that was not written: `on_unwritten` raises.
inline void RaiseUnwritten(const Plan& plan, size_t number) {
  CallMethod(plan.hooks, "on_unwritten", Ref::Steal(PyLong_FromSize_t(number)));
}

}  // namespace hostcall
