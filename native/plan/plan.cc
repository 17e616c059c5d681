#include "plan/plan.h"

#include <stdexcept>
#include <utility>

#include "plan/throttle.h"

namespace hostcall {
namespace {

/// The product of `product` and the sizes, those without a flag left out. The sizes
/// of a loaded program come from a file, so none is trusted: throws if one is
/// negative, or the product is no number of bytes that an array can have. A size of
/// 0 does not hide others.
template <typename Size>
int64_t Product(const std::vector<Size>& sizes, int64_t product,
                const std::vector<bool>* flags = nullptr) {
  constexpr int64_t kMost = int64_t{1} << 60;
  bool empty = false;
  for (size_t axis = 0; axis < sizes.size(); ++axis) {
    const int64_t size = sizes[axis];
    if (flags != nullptr && !(*flags)[axis]) continue;
    if (size < 0) throw std::invalid_argument("a size of a call is negative");
    if (size == 0) {
      empty = true;
    } else if (product > kMost / size) {
      throw std::invalid_argument("the sizes of a call are too large for an array");
    } else {
      product *= size;
    }
  }
  return empty ? 0 : product;
}

/// For a buffer that has only the flagged batch axes, returns how many of its rows
/// one step along each axis of the grid takes (Leaf::grid_strides).
std::vector<int64_t> GridStrides(const std::vector<int64_t>& grid,
                                 const std::vector<bool>& batched) {
  if (batched.size() != grid.size()) {
    throw std::invalid_argument("a leaf needs one flag per batch axis");
  }
  std::vector<int64_t> strides(grid.size(), 0);
  int64_t step = 1;
  for (size_t axis = grid.size(); axis-- > 0;) {
    if (!batched[axis]) continue;
    strides[axis] = step;
    step *= grid[axis];
  }
  return strides;
}

void Derive(const std::vector<int64_t>& grid, Leaf& leaf) {
  leaf.grid_strides = GridStrides(grid, leaf.batched);
  leaf.count = Product(leaf.dims, 1);
  leaf.row_bytes = Product(leaf.dims, PyDataType_ELSIZE(leaf.descr()));
  // The engine copies a fill of this size into each masked row.
  if (leaf.fill && PyBytes_GET_SIZE(leaf.fill.get()) != leaf.row_bytes) {
    throw std::invalid_argument(
        "a fill should have the bytes of one row of its result");
  }
  leaf.rows = Product(grid, 1, &leaf.batched);
  Product(grid, std::max<int64_t>(leaf.row_bytes, 1), &leaf.batched);
}

}  // namespace

Plan::Plan(PlanFields fields) : PlanFields(std::move(fields)) {
  if (team && team->size < 1) throw std::invalid_argument("a team is empty");
  rows = Product(grid, 1);
  for (auto* leaves : {&args, &results}) {
    for (Leaf& leaf : *leaves) {
      Derive(grid, leaf);
      packed |= leaf.bits != 0;
      (leaves == &args ? bytes_in : bytes_out) += leaf.row_bytes;
    }
  }
  masked = mask.has_value();
  if (masked) {
    mask_strides = GridStrides(grid, *mask);
    mask_rows = Product(grid, 1, &*mask);
  }
  // Behind what is derived above, from which the kind may derive more.
  kind = std::exchange(prototype, nullptr)->For(*this);
  operand_bytes = OperandBytes(&Leaf::buffer_bytes);
  result_bytes = ResultBytes(&Leaf::buffer_bytes);
  counts = &counters->taps;
  spares.reset(new Spare[kind->SpareCount(*this)]);
  if (counted) executions = std::make_unique<DeviceRunCounts>();
}

std::vector<size_t> Plan::OperandBytes(Bytes bytes) const {
  std::vector<size_t> sizes = MaskAndArgumentBytes(bytes);
  const std::vector<size_t> extra = kind->ExtraOperands();
  sizes.insert(sizes.end(), extra.begin(), extra.end());
  return sizes;
}

std::vector<size_t> Plan::ResultBytes(Bytes bytes) const {
  std::vector<size_t> sizes;
  for (const Leaf& leaf : kind->ReturnedLeaves(*this)) {
    sizes.push_back((leaf.*bytes)());
  }
  if (returns_outcome) sizes.push_back(kOutcomeBytes);
  const std::vector<size_t> extra = kind->ExtraResults();
  sizes.insert(sizes.end(), extra.begin(), extra.end());
  return sizes;
}

const std::vector<Leaf>& Kind::ReturnedLeaves(const Plan& plan) const {
  return plan.results;
}

size_t Kind::SpareCount(const Plan& plan) const { return plan.args.size(); }

std::unique_ptr<Throttle> Kind::NewThrottle() const { return nullptr; }

}  // namespace hostcall
