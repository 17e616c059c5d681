#include "plan/plan.h"

#include <memory>
#include <vector>

namespace hostcall {

void Plan::Seal() {
  rows = 1;
  for (int64_t size : grid) rows *= size;
  spares.reset(new Spare[lend == Lend::kBuffers ? 1 + results.size() + args.size()
                                                : args.size()]);
  mask_rows = 1;
  for (size_t axis = 0; masked && axis < grid.size(); ++axis) {
    if (mask_strides[axis] != 0) mask_rows *= grid[axis];
  }
  packed = false;
  bytes_in = bytes_out = 0;
  for (auto* leaves : {&args, &results}) {
    for (Leaf& leaf : *leaves) {
      leaf.count = 1;
      for (npy_intp dim : leaf.dims) leaf.count *= dim;
      leaf.row_bytes = leaf.count * PyDataType_ELSIZE(leaf.descr());
      leaf.rows = 1;
      for (size_t axis = 0; axis < grid.size(); ++axis) {
        if (leaf.grid_strides[axis] != 0) leaf.rows *= grid[axis];
      }
      packed |= leaf.bits != 0;
      (leaves == &args ? bytes_in : bytes_out) += leaf.row_bytes;
    }
  }
  if (keep) {
    std::vector<size_t> sizes;
    for (const Leaf& leaf : args) sizes.push_back(leaf.buffer_bytes());
    history = std::make_unique<History>(static_cast<size_t>(*keep), sizes);
  }
  if (!tap) return;
  layout = {};
  const auto place = [this](size_t bytes) {
    layout.offsets.push_back(layout.bytes);
    // A multiple of 16 suits the alignment of every element type, up to complex128.
    layout.bytes += (bytes + 15) / 16 * 16;
  };
  if (masked) place(static_cast<size_t>(mask_rows));
  for (const Leaf& leaf : args) place(leaf.buffer_bytes());
}

}  // namespace hostcall
