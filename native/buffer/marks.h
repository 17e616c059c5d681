// Detects whether a function wrote to an output: marks it before the call, and
// looks for the marks afterwards.
//
// Does not depend on Python (tests/native/buffers_test.cc).
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

namespace hostcall {

/// A mark is a pattern that no sane result contains: as a float it is a NaN with a
/// payload of its own, as an integer it is far from 0. An element that still has it
/// was not written. It has 8 bytes, which no result contains by chance, or 4, for
/// elements of that size. A smaller element can't be told from a result.
class Marks {
 public:
  static constexpr int64_t kSome = 16;

  /// No marks.
  Marks() = default;
  /// Puts up to `most` marks of `unit` bytes, 4 or 8, into `bytes` at `data`,
  /// spread evenly, the first and the last place included.
  Marks(char* data, int64_t bytes, int64_t unit, int64_t most)
      : data_(data),
        unit_(unit),
        places_(bytes / unit),
        count_(std::min(places_, most)) {
    // A new pattern each time, so that what an earlier call left in the memory
    // can't pass for a mark. Atomic, as native code runs without the GIL; relaxed,
    // as patterns only have to differ.
    static std::atomic<uint64_t> next{1};
    const uint64_t number = next.fetch_add(1, std::memory_order_relaxed);
    // The golden ratio spreads the numbers over all bits, of which 16 are taken.
    const uint64_t seed = number * 0x9E3779B97F4A7C15ull;
    const uint64_t half = 0xFFE5'0000ull | (seed >> 48);  // as a float32: a NaN
    mark_ = half << 32 | half;
    for (int64_t i = 0; i < count_; ++i) {
      std::memcpy(At(i), &mark_, static_cast<size_t>(unit_));
    }
  }
  /// False if a mark is left, so part of the array was not written.
  bool Overwritten() const {
    for (int64_t i = 0; i < count_; ++i) {
      if (std::memcmp(At(i), &mark_, static_cast<size_t>(unit_)) == 0) return false;
    }
    return true;
  }

 private:
  /// The address of mark `i`.
  char* At(int64_t i) const {
    if (count_ == places_) return data_ + unit_ * i;
    const int64_t last = count_ - 1;
    if (last == 0) return data_;
    // There are so few marks that the product fits.
    return data_ + unit_ * ((places_ - 1) * i / last);
  }
  char* data_ = nullptr;  ///< the array; not owned
  int64_t unit_ = 8;
  int64_t places_ = 0;  ///< where marks may be
  int64_t count_ = 0;
  uint64_t mark_ = 0;  ///< the pattern, twice the same 4 bytes
};

}  // namespace hostcall
