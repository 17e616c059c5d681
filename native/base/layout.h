// Values of given sizes behind each other in one block.
//
// Does not depend on Python (tests/native/feed_ring_test.cc).
#pragma once

#include <cstddef>
#include <vector>

namespace hostcall {

struct Layout {
  Layout() = default;
  /// The default alignment suits every element type, up to complex128.
  explicit Layout(const std::vector<size_t>& sizes, size_t align = 16) {
    for (const size_t size : sizes) {
      offsets.push_back(bytes);
      bytes += (size + align - 1) / align * align;
    }
  }
  std::vector<size_t> offsets;  ///< where each value begins
  size_t bytes = 0;             ///< of the block, with padding
};

}  // namespace hostcall
