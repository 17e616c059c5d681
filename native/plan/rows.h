// The rows of a vmapped call: where they lie in memory, and how to walk over them.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "base/bytes.h"
#include "base/no_copy.h"
#include "base/small_array.h"
#include "plan/packing.h"
#include "plan/plan.h"

namespace hostcall {

/// The Python arguments of one row; owns a reference to each that is set. The GIL
/// is held at its destruction.
class RowArrays : NoCopy {
 public:
  /// With one place before the arguments for args(), one behind them for `out=`.
  explicit RowArrays(size_t n) : n_(n + 2), all_(n_) {
    std::fill_n(all_.data(), n_, nullptr);
  }
  ~RowArrays() {  // as ~Ref: an array may die, and a finalizer may run Python code
    OrPark([this] {
      for (size_t i = 0; i < n_; ++i) Py_XDECREF(all_.data()[i]);
    });
  }
  /// The first argument. There is a free place before it, which a vectorcall with
  /// PY_VECTORCALL_ARGUMENTS_OFFSET may use for `self`.
  PyObject** args() { return all_.data() + 1; }
  /// function(*the first n arguments). Null with a Python error set. With
  /// `keywords`, a tuple of names, their values follow.
  Ref Pass(const Ref& function, size_t n, PyObject* keywords = nullptr) {
    return Ref::Steal(CallPython(function.get(), args(),
                                 n | PY_VECTORCALL_ARGUMENTS_OFFSET, keywords));
  }

 private:
  const size_t n_;
  SmallArray<PyObject*, 10> all_;
};

/// Writes a row of a result that `where` keeps from the function: the leaf's fill
/// value, or zeros.
inline void FillRow(const Leaf& leaf, char* target) {
  if (leaf.fill) {
    CopyBytes(target, PyBytes_AS_STRING(leaf.fill.get()),
              static_cast<size_t>(leaf.row_bytes));
  } else {
    FillBytes(target, 0, static_cast<size_t>(leaf.row_bytes));
  }
}

/// Walks over the rows of a call in order, and points at the memory of the current
/// one: in XLA's buffers, or in unpacked copies of leaves with small elements. On a
/// GPU's own memory, which the host can't read, nothing is unpacked. Needs no GIL.
/// The arrays that args() and targets() return are overwritten by their next call.
class Rows : NoCopy {
 public:
  Rows(const Plan& plan, const void* const* operands, void* const* results,
       bool on_gpu = false)
      : plan_(plan),
        results_(results),
        on_gpu_(on_gpu),
        mask_(plan.masked ? static_cast<const bool*>(operands[0]) : nullptr),
        walker_(plan.grid),
        args_(plan.args.size()),
        targets_(plan.results.size()) {
    const size_t first = plan.masked ? 1 : 0;
    for (size_t i = 0; i < plan.args.size(); ++i) {
      char* data = static_cast<char*>(const_cast<void*>(operands[first + i]));
      first_args_.push_back(Packed(plan.args[i]) ? Unpacked(plan.args[i], data)
                                                 : data);
    }
    for (size_t i = 0; i < plan.results.size(); ++i) {
      const Leaf& leaf = plan.results[i];
      char* data = static_cast<char*>(results[i]);
      if (Packed(leaf)) {
        // A result that aliases an argument starts with the argument's values.
        data = plan.kind->Aliases(i) ? Unpacked(leaf, data)
                                     : Scratch(leaf.count * leaf.rows);
      }
      first_targets_.push_back(data);
    }
  }

  const std::vector<int64_t>& index() const { return walker_.index(); }
  /// Whether `where` lets the current row through.
  bool is_wanted() const {
    return mask_ == nullptr || mask_[walker_.RowOf(plan_.mask_strides)];
  }
  /// Goes to the next row; false if there is none.
  bool Next() { return walker_.Next(); }
  char* const* args() { return Point(plan_.args, first_args_, args_); }
  char* const* targets() { return Point(plan_.results, first_targets_, targets_); }
  /// Fills the results of the current row in place of the function, and counts it.
  void Fill() {
    plan_.counters->masked.fetch_add(1, std::memory_order_relaxed);
    targets();
    for (size_t i = 0; i < targets_.size(); ++i) {
      FillRow(plan_.results[i], targets_[i]);
    }
  }
  /// Packs the results with small elements into XLA's buffers, behind the last row.
  void Finish() {
    for (size_t i = 0; i < plan_.results.size(); ++i) {
      const Leaf& leaf = plan_.results[i];
      if (!Packed(leaf)) continue;
      PackBits(first_targets_[i], results_[i], leaf.count * leaf.rows, leaf.bits);
    }
  }

 private:
  /// For each leaf, the address of a row on the host.
  using Bases = std::vector<char*>;

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
  char* const* Point(const std::vector<Leaf>& leaves, const Bases& firsts,
                     Bases& row) const {
    for (size_t i = 0; i < row.size(); ++i) {
      row[i] =
          firsts[i] + walker_.RowOf(leaves[i].grid_strides) * leaves[i].row_bytes;
    }
    return row.data();
  }
  const Plan& plan_;
  void* const* results_;
  const bool on_gpu_;
  const bool* mask_;  ///< the values of `where`; null if there is none
  RowWalker walker_;
  Bases args_, targets_;                          ///< of the current row
  Bases first_args_, first_targets_;              ///< of the first rows
  std::vector<std::unique_ptr<char[]>> scratch_;  ///< unpacked elements
};

}  // namespace hostcall
