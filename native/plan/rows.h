// The rows of a vmapped call: where they lie in memory, and how to walk over them.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "base/few.h"
#include "base/no_copy.h"
#include "plan/packing.h"
#include "plan/plan.h"

namespace hostcall {

/// For each leaf, the address of its first row on the host: in XLA's buffer, or in
/// a scratch block with unpacked elements.
using Bases = std::vector<char*>;

/// The Python arguments of one row; owns a reference to each that is set. The GIL
/// is held at its destruction.
class RowArrays : NoCopy {
 public:
  /// With one place before the arguments for args(), one behind them for `out=`.
  explicit RowArrays(size_t n) : n_(n + 2), all_(n_) {
    std::fill_n(all_.data(), n_, nullptr);
  }
  ~RowArrays() {
    for (size_t i = 0; i < n_; ++i) Py_XDECREF(all_.data()[i]);
  }
  /// The first argument. There is a free place before it, which a vectorcall with
  /// PY_VECTORCALL_ARGUMENTS_OFFSET may use for `self`.
  PyObject** args() { return all_.data() + 1; }

 private:
  const size_t n_;
  Few<PyObject*, 10> all_;
};

/// The buffers of a call as the host sees them: XLA's memory, or unpacked copies of
/// leaves with small elements. On a GPU's own memory, which the host can't read,
/// nothing is unpacked. Needs no GIL.
class HostView {
 public:
  HostView(const Plan& plan, const void* const* operands, void* const* results,
           bool on_gpu = false)
      : plan_(plan), results_(results), on_gpu_(on_gpu) {
    const size_t first = plan.masked ? 1 : 0;
    for (size_t i = 0; i < plan.args.size(); ++i) {
      char* data = static_cast<char*>(const_cast<void*>(operands[first + i]));
      args.push_back(Packed(plan.args[i]) ? Unpacked(plan.args[i], data) : data);
    }
    for (size_t i = 0; i < plan.results.size(); ++i) {
      const Leaf& leaf = plan.results[i];
      char* data = static_cast<char*>(results[i]);
      if (Packed(leaf)) {
        // A result that aliases an argument starts with the argument's values.
        const bool holds = plan.buffers.Aliases(i);
        data = holds ? Unpacked(leaf, data) : Scratch(leaf.count * leaf.rows);
      }
      targets.push_back(data);
    }
  }

  /// Packs the results with small elements into XLA's buffers.
  void Finish() {
    for (size_t i = 0; i < plan_.results.size(); ++i) {
      const Leaf& leaf = plan_.results[i];
      if (!Packed(leaf)) continue;
      PackBits(targets[i], results_[i], leaf.count * leaf.rows, leaf.bits);
    }
  }

  Bases args;     ///< of the arguments
  Bases targets;  ///< of the results

 private:
  bool Packed(const Leaf& leaf) const { return leaf.bits != 0 && !on_gpu_; }
  /// Zeroed memory that lives as long as this object.
  char* Scratch(int64_t bytes) {
    scratch_.emplace_back(new char[static_cast<size_t>(bytes)]());
    return scratch_.back().get();
  }
  char* Unpacked(const Leaf& leaf, const char* data) {
    const int64_t count = leaf.count * leaf.rows;
    char* bytes = Scratch(count);
    UnpackBits(data, bytes, count, leaf.bits, leaf.is_signed);
    return bytes;
  }
  const Plan& plan_;
  void* const* results_;
  bool on_gpu_;
  std::vector<std::unique_ptr<char[]>> scratch_;
};

/// Writes a row of a result that `where` keeps from the function: the leaf's fill
/// value, or zeros.
inline void FillRow(const Leaf& leaf, char* target) {
  if (leaf.fill) {
    std::memcpy(target, PyBytes_AS_STRING(leaf.fill.get()),
                static_cast<size_t>(leaf.row_bytes));
  } else {
    std::memset(target, 0, static_cast<size_t>(leaf.row_bytes));
  }
}

/// Walks over the rows of a call in order, and points at the memory of the current
/// one. The arrays that args() and targets() return are overwritten by their next
/// call.
class Rows {
 public:
  Rows(const Plan& plan, const bool* mask, HostView& view)
      : plan_(plan), mask_(mask), view_(view), walker_(plan.grid) {
    args_.resize(plan.args.size());
    targets_.resize(plan.results.size());
  }
  const std::vector<int64_t>& index() const { return walker_.index(); }
  /// Whether `where` lets the current row through.
  bool wanted() const {
    return mask_ == nullptr || mask_[walker_.RowOf(plan_.mask_strides)];
  }
  /// Goes to the next row; false if there is none.
  bool Next() { return walker_.Next(); }
  char* const* args() { return Point(plan_.args, view_.args, args_); }
  char* const* targets() { return Point(plan_.results, view_.targets, targets_); }
  /// Fills the results of the current row in place of the function, and counts it.
  void Fill() {
    plan_.counters->masked.fetch_add(1, std::memory_order_relaxed);
    targets();
    for (size_t i = 0; i < targets_.size(); ++i) {
      FillRow(plan_.results[i], targets_[i]);
    }
  }

 private:
  char* const* Point(const std::vector<Leaf>& leaves, const Bases& bases,
                     Bases& at) const {
    for (size_t i = 0; i < at.size(); ++i) {
      at[i] =
          bases[i] + walker_.RowOf(leaves[i].grid_strides) * leaves[i].row_bytes;
    }
    return at.data();
  }
  const Plan& plan_;
  const bool* mask_;  ///< the values of `where`; null if there is none
  HostView& view_;
  RowWalker walker_;
  Bases args_, targets_;  ///< addresses of the current row
};

}  // namespace hostcall
