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
//   * The frames of a traceback. They hold the arrays of a function that failed, so
//     they are cleared before the references are counted.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
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

/// Replaces an array by what the function gets for it. On an error `*array` is
/// null, which its owner may still release.
bool Convert(const Leaf& leaf, PyObject** array);

/// Returns an array for many rows, with the axes of `grid` in front, whose memory
/// is not set. Null with a Python error set.
Ref ArrayOfRows(const Leaf& leaf, const std::vector<int64_t>& grid);

/// Returns an array over XLA's memory at `data`, which must outlive it, or Disown
/// is needed. Its reference count is merged. Null with a Python error set.
Ref LentArray(const Leaf& leaf, char* data, bool writeable);

/// Points an escaped array at its own copy of the values, so that at least the
/// array itself stays safe to touch. Views of it still point at XLA's memory.
/// Without memory for a copy, nothing changes.
void Disown(PyObject* array, const Leaf& leaf);

/// Called if views may have escaped a call, whether or not a Python error is set.
///
///   1. The plan's on_escape clears the frames of the failed call, if there is an
///      error: they hold the arrays too.
///   2. `collect(list)` appends what is still held (AddEscape); false with an error
///      set.
///   3. If the list is not empty, on_escape raises for it.
///
/// Returns true if nothing was held; the error that was set is then set again.
/// Otherwise returns false with the new error set.
bool ReportEscapes(const Plan& plan,
                   const std::function<bool(PyObject* held)>& collect);
/// Appends (number, is_result) to the list. False with a Python error set.
bool AddEscape(PyObject* held, size_t number, bool is_result);

/// Sets the Python error for a result that was not written: `on_unwritten` raises.
inline void RaiseUnwritten(const Plan& plan, size_t number) {
  Ask(plan.info, "on_unwritten", plan.info, Ref::Steal(PyLong_FromSize_t(number)));
}

/// Detects whether a function wrote to an `out` array: marks it before the call,
/// and looks for the marks afterwards.
///
/// Up to 16 words of 8 bytes across the array hold a pattern that no sane result
/// contains: as a float32 it is a NaN, as a 32-bit integer it is far from 0. An
/// element that still has the pattern was not written. A single element of less
/// than 4 bytes can't be told from a result, so for those a whole word must be
/// unchanged, and small arrays are only zeroed.
class Canaries {
 public:
  Canaries(char* data, int64_t bytes, int64_t itemsize)
      : data_(data), unit_(itemsize == 4 ? 4 : kWord) {
    if (bytes <= kZeroBytes) std::memset(data, 0, static_cast<size_t>(bytes));
    if (itemsize >= 4 || bytes > kZeroBytes) words_ = bytes / kWord;
    // A new pattern each time, so that what an earlier call left in the memory
    // can't pass for a mark.
    static std::atomic<uint64_t> made{1};
    const uint64_t seed =
        made.fetch_add(1, std::memory_order_relaxed) * 0x9E3779B97F4A7C15ull;
    value_ = 0xFFE5'0000'FFE5'0000ull | ((seed >> 16) & 0xFFFF'0000'FFFFull);
    for (int i = 0; i < count(); ++i) std::memcpy(At(i), &value_, kWord);
  }
  /// False if a mark is left, so part of the array was not written.
  bool Overwritten() const {
    const char* mark = reinterpret_cast<const char*>(&value_);
    for (int i = 0; i < count(); ++i) {
      for (int64_t at = 0; at < kWord; at += unit_) {
        if (std::memcmp(At(i) + at, mark + at, static_cast<size_t>(unit_)) == 0) {
          return false;
        }
      }
    }
    return true;
  }

 private:
  static constexpr int64_t kWord = 8;
  static constexpr int64_t kMost = 16;
  /// The number of marks.
  int count() const { return static_cast<int>(std::min(words_, kMost)); }
  /// The address of mark `i`. They are spread evenly, the first and the last word
  /// included.
  char* At(int i) const {
    const int64_t last = count() - 1;
    const int64_t word = last == 0 ? 0 : (words_ - 1) * i / last;
    return data_ + word * kWord;
  }
  char* data_;         ///< the array; not owned
  int64_t unit_;       ///< bytes that are compared at a time
  int64_t words_ = 0;  ///< words in the array that may hold marks
  uint64_t value_;     ///< the pattern
};

/// The lent arrays of one call: makes them, and checks at the end that nobody kept
/// one. The GIL is held throughout.
class Loan {
 public:
  explicit Loan(const Plan& plan) : plan_(plan) {}

  /// Makes an array over the row at `data`, and returns a borrowed reference; null
  /// with a Python error set. Arrays of results are writeable.
  PyObject* Lend(size_t number, bool is_result, char* data);

  /// Called after the call, when only this object should hold the arrays. Returns
  /// whether no Python error is set. An error that is set stays set, unless an
  /// array escaped: then the error says that.
  bool End();

 private:
  struct Entry {
    size_t number;   ///< of the leaf
    bool is_result;  ///< in plan.results; else in plan.args
    Ref array;       ///< null once nobody holds it
  };
  /// Whether somebody else holds the array. If not, it is gone afterwards.
  static bool Held(Entry& entry) {
    if (!entry.array) return false;
    if (!DropIfLast(entry.array.get())) return true;
    (void)entry.array.release();
    return false;
  }
  bool AnyHeld() {
    bool held = false;  // all are asked
    for (Entry& entry : entries_) held |= Held(entry);
    return held;
  }

  const Plan& plan_;
  std::vector<Entry> entries_;
};

}  // namespace hostcall
