// Packed elements and rows, compared with plain loops; and marks.
#undef NDEBUG
#include <algorithm>
#include <cassert>
#include <cstdint>
#include <cstdio>
#include <random>
#include <thread>
#include <vector>

#include "buffer/marks.h"
#include "plan/packing.h"

using hostcall::Marks;
using hostcall::PackBits;
using hostcall::RowWalker;
using hostcall::UnpackBits;

namespace {

constexpr uint8_t kGuard = 0xA5;

/// Element `i`, read bit by bit.
int Element(const std::vector<uint8_t>& packed, int64_t i, int bits,
            bool is_signed) {
  int value = 0;
  for (int bit = 0; bit < bits; ++bit) {
    const int64_t at = i * bits + bit;
    value |= ((packed[static_cast<size_t>(at / 8)] >> (at % 8)) & 1) << bit;
  }
  if (is_signed && (value & (1 << (bits - 1)))) value -= 1 << bits;
  return value;
}

void UnpackAgreesWithBits(int bits, bool is_signed, int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  const auto bytes = static_cast<size_t>((count * bits + 7) / 8);
  std::vector<uint8_t> packed(bytes);
  for (uint8_t& byte : packed) byte = static_cast<uint8_t>(random());
  std::vector<uint8_t> out(static_cast<size_t>(count) + 4, kGuard);
  UnpackBits(packed.data(), out.data(), count, bits, is_signed);
  for (int64_t i = 0; i < count; ++i) {
    const int want = Element(packed, i, bits, is_signed);
    const uint8_t got = out[static_cast<size_t>(i)];
    assert(is_signed ? static_cast<int8_t>(got) == want : got == want);
  }
  for (size_t i = static_cast<size_t>(count); i < out.size(); ++i) {
    assert(out[i] == kGuard);
  }
}

void PackUndoesUnpack(int bits, bool is_signed, int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<uint8_t> bytes(static_cast<size_t>(count));
  // The high bits are arbitrary, and must not reach neighbouring elements.
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  const auto size = static_cast<size_t>((count * bits + 7) / 8);
  std::vector<uint8_t> packed(size + 4, kGuard);
  PackBits(bytes.data(), packed.data(), count, bits);
  for (size_t i = size; i < packed.size(); ++i) assert(packed[i] == kGuard);
  std::vector<uint8_t> back(bytes.size());
  UnpackBits(packed.data(), back.data(), count, bits, is_signed);
  const uint8_t mask = static_cast<uint8_t>((1 << bits) - 1);
  for (size_t i = 0; i < bytes.size(); ++i) {
    assert((back[i] & mask) == (bytes[i] & mask));
  }
  if (count * bits % 8 != 0) {
    assert((packed[size - 1] >> (count * bits % 8)) == 0);  // padding is zero
  }
}

void RowsFollowTheNestedLoop() {
  const std::vector<int64_t> grid = {2, 3, 4};
  const std::vector<int64_t> all = {12, 4, 1}, outer_and_inner = {4, 0, 1},
                             none = {0, 0, 0};
  RowWalker walker(grid);
  int64_t row = 0;
  for (int64_t i = 0; i < 2; ++i) {
    for (int64_t j = 0; j < 3; ++j) {
      for (int64_t k = 0; k < 4; ++k, ++row) {
        assert((walker.index() == std::vector<int64_t>{i, j, k}));
        assert(walker.RowOf(all) == row);
        assert(walker.RowOf(outer_and_inner) == 4 * i + k);
        assert(walker.RowOf(none) == 0);
        assert(walker.Next() == (row != 23));
      }
    }
  }
}

void NoAxesAreOneRow() {
  const std::vector<int64_t> grid;
  RowWalker walker(grid);
  assert(walker.index().empty());
  assert(walker.RowOf({}) == 0);
  assert(!walker.Next());
}

void ManyReadersOfOneBuffer() {
  constexpr int64_t kCount = 4097;
  std::vector<uint8_t> packed((kCount + 1) / 2);
  for (size_t i = 0; i < packed.size(); ++i)
    packed[i] = static_cast<uint8_t>(i * 37);
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&packed, t] {
      std::vector<uint8_t> out(kCount);
      UnpackBits(packed.data(), out.data(), kCount, 4, t % 2 == 0);
      for (int64_t i = 0; i < kCount; ++i) {
        assert((out[static_cast<size_t>(i)] & 15) ==
               (Element(packed, i, 4, false) & 15));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

/// Every mark is found until its element is written; nothing else is touched.
void MarksTellWhatWasWritten(int64_t unit, int64_t bytes, int64_t most) {
  std::vector<char> data(static_cast<size_t>(bytes) + 8, 1);
  const Marks marks(data.data(), bytes, unit, most);
  const int64_t places = bytes / unit;
  int64_t marked = 0;
  for (int64_t at = 0; at < places; ++at) {
    const bool mark = data[static_cast<size_t>(at * unit + unit - 1)] != 1;
    assert(mark || (at != 0 && at != places - 1) || most == 0);
    assert(marks.Overwritten() == (marked == std::min(places, most)));
    marked += mark;
    for (int64_t i = 0; i < unit; ++i) data[static_cast<size_t>(at * unit + i)] = 2;
  }
  assert(marked == std::min(places, most) && marks.Overwritten());
  for (int64_t at = places * unit; at < bytes + 8; ++at) {
    assert(data[static_cast<size_t>(at)] == 1);
  }
  assert(Marks().Overwritten());
}

}  // namespace

int main() {
  uint32_t seed = 1;
  for (int bits : {1, 2, 4}) {
    for (bool is_signed : {false, true}) {
      for (int64_t count : {0, 1, 2, 3, 5, 7, 8, 9, 15, 63, 1001}) {
        UnpackAgreesWithBits(bits, is_signed, count, ++seed);
        PackUndoesUnpack(bits, is_signed, count, ++seed);
      }
    }
  }
  PackBits(nullptr, nullptr, 0, 4);  // no elements may have no memory
  RowsFollowTheNestedLoop();
  NoAxesAreOneRow();
  ManyReadersOfOneBuffer();
  for (int64_t unit : {4, 8}) {
    for (int64_t bytes : {0, 3, 4, 8, 20, 1000, 4096}) {
      for (int64_t most : {int64_t{0}, Marks::kSome, bytes}) {
        MarksTellWhatWasWritten(unit, bytes, most);
      }
    }
  }
  std::puts("buffers: ok");
}
