// Elements smaller than a byte, and the rows of a batch, of any sizes: compared
// with plain loops.
#include "plan/packing.h"

#include <cstdint>
#include <cstdlib>
#include <vector>

namespace {

void Check(bool holds) {
  if (!holds) std::abort();
}

void Packed(const uint8_t* data, int64_t count, int bits, bool is_signed) {
  // As large as they must be, so that AddressSanitizer sees a byte too many.
  std::vector<uint8_t> packed(static_cast<size_t>((count * bits + 7) / 8));
  std::vector<uint8_t> back(static_cast<size_t>(count));
  hostcall::PackBits(data, packed.data(), count, bits);
  hostcall::UnpackBits(packed.data(), back.data(), count, bits, is_signed);
  for (int64_t i = 0; i < count; ++i) {
    int value = data[i] & ((1 << bits) - 1);
    if (is_signed && (value >> (bits - 1)) != 0) value -= 1 << bits;
    Check(back[static_cast<size_t>(i)] == static_cast<uint8_t>(value));
  }
}

/// Walks a grid, and compares with the numbers of its rows counted up.
void Walked(const uint8_t* data, size_t size) {
  std::vector<int64_t> grid, strides;
  int64_t total = 1;
  for (size_t i = 0; i < size && i < 5; ++i) grid.push_back(1 + data[i] % 6);
  for (size_t axis = grid.size(); axis-- > 0; total *= grid[axis]) {
    strides.insert(strides.begin(), total);
  }
  hostcall::RowWalker walker(grid);
  int64_t rows = 0;
  do {
    Check(walker.RowOf(strides) == rows);
    Check(walker.RowOf({}) == 0);
  } while (++rows, walker.Next());
  Check(rows == total);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const int bits = 1 << data[0] % 3;
  Packed(data + 2, static_cast<int64_t>(size) - 2, bits, data[1] % 2 != 0);
  Walked(data + 2, size - 2);
  return 0;
}
