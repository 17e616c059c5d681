// NumPy arrays over a row of XLA's buffers: owned by the function, or
// lent.
//
//   copy   Each array is NumPy's own memory, filled before the call. The function
//          may keep it, write to it, give it to a thread. One that it has not kept
//          (ours is the only reference, no weak one exists, and it is as it was
//          made) is filled again for the next call: nobody can tell.
//   lend   Each array is a view of XLA's memory, which XLA reuses when the handler
//          returns. Hazards: a write (the flag is off, and since the base is not
//          an array, NumPy refuses to switch it on); an escape (a derived view,
//          memoryview, DLPack capsule or tensor holds a reference to the array, so
//          a count above ours after the call is an escape: an error, while the
//          memory is still whole); the frames of a traceback (cleared, since they
//          would hold the arrays of a function that failed).
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#include "plan/plan.h"

namespace hostcall {

/// Copies larger than this let other Python threads run meanwhile.
constexpr int64_t kReleaseBytes = 1 << 18;
/// Arrays larger than this are not kept for the next call.
constexpr int64_t kSpareBytes = 1 << 23;
/// Inputs up to this are watched, where a consumer of them might write.
constexpr int64_t kWatchedBytes = 1 << 16;
/// Results smaller than this are zeroed before they are lent for writing.
constexpr int64_t kZeroBytes = 4096;

/// True where nobody could tell this array from a new one.
bool AsMade(PyObject* object, const Leaf& leaf);

/// An array that the function owns, with the row at `data`. Uses up `spare`.
Ref OwnedArray(const Leaf& leaf, const char* data, Ref spare = Ref());

/// An array over the row at `data`, which is XLA's.
Ref LentArray(const Leaf& leaf, char* data, bool writeable);

/// Points a lent array that escaped at a copy of its own, so that at least the
/// array itself stays safe to touch.
void Disown(PyObject* array, const Leaf& leaf);

/// What is done where views may have escaped a call, with a Python error set or
/// none: Python clears the frames of a failed call, `collect(list)` adds what is
/// then still held (AddEscape; false with an error set), and Python raises for
/// that. True where nothing is: the error that was set is set again.
bool ReportEscapes(const Plan& plan,
                   const std::function<bool(PyObject* held)>& collect);
bool AddEscape(PyObject* held, size_t number, bool is_result);

/// Marks that a function which fills its `out` overwrites.
///
/// Up to 16 words across the array hold a pattern that no sane result has (as a
/// float32 it is a NaN, as an integer of 32 bits far from 0). An element that still
/// has it was not written. Elements of less than 4 bytes can't be told from a
/// result one by one: there a whole word must be left, and small arrays are only
/// zeroed.
class Canaries {
 public:
  Canaries(char* data, int64_t bytes, int64_t itemsize)
      : data_(data), unit_(itemsize == 4 ? 4 : kWord) {
    if (bytes <= kZeroBytes) std::memset(data, 0, static_cast<size_t>(bytes));
    if (itemsize >= 4 || bytes > kZeroBytes) words_ = bytes / kWord;
    static uint64_t seed = 0x9E3779B97F4A7C15ull;  // guarded by the GIL
    seed = seed * 6364136223846793005ull + 1442695040888963407ull;
    value_ = 0xFFE5'0000'FFE5'0000ull | ((seed >> 16) & 0xFFFF'0000'FFFFull);
    for (int i = 0; i < count(); ++i) std::memcpy(At(i), &value_, kWord);
  }
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
  int count() const { return static_cast<int>(std::min(words_, kMost)); }
  char* At(int i) const {
    const int64_t last = count() - 1;
    const int64_t word = last == 0 ? 0 : (words_ - 1) * i / last;
    return data_ + word * kWord;
  }
  char* data_;
  int64_t unit_;
  int64_t words_ = 0;
  uint64_t value_;
};

/// The lent arrays of one call: made, watched, and found again at its end.
class Loan {
 public:
  explicit Loan(const Plan& plan) : plan_(plan) {}

  /// An array over the row at `data`, borrowed; a result's is writeable.
  PyObject* Lend(size_t number, bool is_result, char* data);

  /// Called when only these entries should hold the arrays. With a Python error
  /// set it stays set, but for an escape, which sets its own.
  bool End();

 private:
  struct Entry {
    size_t number;
    bool is_result;
    Ref array;
  };
  static bool Held(const Entry& entry) { return Py_REFCNT(entry.array.get()) > 1; }
  bool AnyHeld() const {
    return std::any_of(entries_.begin(), entries_.end(), Held);
  }

  const Plan& plan_;
  std::vector<Entry> entries_;
};

}  // namespace hostcall
