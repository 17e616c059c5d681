// Conversions between XLA's memory and NumPy's: elements smaller than a byte, and
// the rows of a batch.
//
// Does not depend on Python (tests/native/buffers_test.cc).
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "base/bytes.h"

namespace hostcall {

/// Unpacks `count` elements of 1, 2 or 4 bits into one byte each. XLA packs them,
/// the first in the lowest bits; NumPy (ml_dtypes) keeps each in a byte.
inline void UnpackBits(const void* from, void* to, int64_t count, int bits,
                       bool is_signed) {
  const auto* packed = static_cast<const uint8_t*>(from);
  auto* bytes = static_cast<uint8_t*>(to);
  const int per_byte = 8 / bits;
  const uint8_t mask = static_cast<uint8_t>((1u << bits) - 1);
  const uint8_t sign = static_cast<uint8_t>(1u << (bits - 1));
  for (int64_t i = 0; i < count; ++i) {
    uint8_t v =
        static_cast<uint8_t>(packed[i / per_byte] >> (bits * (i % per_byte))) &
        mask;
    // ml_dtypes reads a signed element from a byte whose high bits repeat the sign.
    if (is_signed && (v & sign)) v = static_cast<uint8_t>(v | ~mask);
    bytes[i] = v;
  }
}

/// Packs `count` elements, the inverse of UnpackBits. High bits of the bytes are
/// ignored, and the padding of the last packed byte is zero.
inline void PackBits(const void* from, void* to, int64_t count, int bits) {
  const auto* bytes = static_cast<const uint8_t*>(from);
  auto* packed = static_cast<uint8_t*>(to);
  const int per_byte = 8 / bits;
  const uint8_t mask = static_cast<uint8_t>((1u << bits) - 1);
  FillBytes(packed, 0, static_cast<size_t>((count + per_byte - 1) / per_byte));
  for (int64_t i = 0; i < count; ++i) {
    packed[i / per_byte] = static_cast<uint8_t>(
        packed[i / per_byte] | ((bytes[i] & mask) << (bits * (i % per_byte))));
  }
}

/// Walks the rows of a batch in row-major order (the last axis changes fastest),
/// like nested Python loops over the same axes. `grid` must outlive the walker.
class RowWalker {
 public:
  explicit RowWalker(const std::vector<int64_t>& grid)
      : grid_(grid), index_(grid.size(), 0) {}

  /// The position of the current row, one number for each axis.
  const std::vector<int64_t>& index() const { return index_; }
  /// Copies the index of a walker of another thread, which may go on meanwhile:
  /// each number is one that was there.
  static std::vector<int64_t> Copy(const std::vector<int64_t>& index) {
    std::vector<int64_t> copy;
    for (const int64_t& at : index) {
      copy.push_back(__atomic_load_n(&at, __ATOMIC_RELAXED));
    }
    return copy;
  }

  /// Goes to the next row; false if there is none.
  bool Next() {
    for (size_t axis = grid_.size(); axis-- > 0;) {
      const int64_t next = index_[axis] + 1;
      const bool inside = next < grid_[axis];
      __atomic_store_n(&index_[axis], inside ? next : 0, __ATOMIC_RELAXED);
      if (inside) return true;
    }
    return false;
  }

  /// The row that a leaf has at the current position. `strides` are in rows; a
  /// stride of 0 means that the leaf is not batched over that axis.
  int64_t RowOf(const std::vector<int64_t>& strides) const {
    int64_t row = 0;
    for (size_t axis = 0; axis < strides.size(); ++axis) {
      row += strides[axis] * index_[axis];
    }
    return row;
  }

 private:
  const std::vector<int64_t>& grid_;
  std::vector<int64_t> index_;
};

}  // namespace hostcall
