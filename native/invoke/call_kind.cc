#include "invoke/call_kind.h"

#include <utility>
#include <vector>

#include "base/bytes.h"
#include "buffer/marks.h"
#include "invoke/invoke.h"
#include "invoke/run_rows.h"
#include "plan/arrays.h"

namespace hostcall {
namespace {

/// The names of a vectorcall's keywords: ("out",). Set by InitCallKind; kept for
/// ever.
PyObject* g_out_keyword = nullptr;

/// The marks for a lent result, which also clear it if it is small.
Marks MarksIn(const Leaf& leaf, char* data) {
  const int64_t bytes = leaf.row_bytes, size = PyDataType_ELSIZE(leaf.descr());
  const bool small = bytes <= kZeroBytes;
  if (small) FillBytes(data, 0, static_cast<size_t>(bytes));
  // Elements of less than 4 bytes can't be told from marks one by one.
  if (bytes < 8 || (size < 4 && small)) return Marks();
  return Marks(data, bytes, size == 4 ? 4 : 8, Marks::kSome);
}

/// Makes an array over the row at `data` that the function borrows. `*lent` keeps
/// it. Returns a second reference; null with a Python error set.
Ref NewLentArray(PyObject** lent, const Leaf& leaf, char* data, bool writeable) {
  *lent = LentArray(leaf, data, writeable).release();
  return Ref::Borrow(*lent);
}

/// Runs one row on arrays that the function borrows, the results first, then the
/// arguments. The return value and all other references are dropped before it
/// returns, or the caller would take them for escapes.
bool CallLent(const Plan& plan, bool out, PyObject** lent, char* const* args,
              char* const* targets) {
  const size_t n = plan.args.size(), outs = plan.results.size();
  RowArrays row(n);
  for (size_t i = 0; i < n; ++i) {
    const Leaf& leaf = plan.args[i];
    Ref array = NewLentArray(&lent[outs + i], leaf, args[i], false);
    row.args()[i] = Converted(leaf, std::move(array)).release();
    if (row.args()[i] == nullptr) return false;
  }
  std::vector<Marks> marks;
  if (out) {
    Ref list = Ref::Steal(PyList_New(static_cast<Py_ssize_t>(outs)));
    if (!list) return false;
    for (size_t i = 0; i < outs; ++i) {
      marks.push_back(MarksIn(plan.results[i], targets[i]));
      Ref array = NewLentArray(&lent[i], plan.results[i], targets[i], true);
      if (!array) return false;
      PyList_SET_ITEM(list.get(), static_cast<Py_ssize_t>(i), array.release());
    }
    row.args()[n] = Call(plan.out_tree.get(), list).release();
    if (row.args()[n] == nullptr) return false;
  }
  Ref value = row.Pass(plan.function, n, out ? g_out_keyword : nullptr);
  if (!value) return false;
  if (!out || value.get() != Py_None) {
    return StoreResults(plan, value.get(), targets);
  }
  for (size_t i = 0; i < outs; ++i) {
    if (marks[i].Overwritten()) continue;
    RaiseUnwritten(plan, i);
    return false;
  }
  return true;
}

/// Runs one row with lent arguments, and with `out`, if that is set.
bool RunLent(const Plan& plan, bool out, char* const* args, char* const* targets) {
  const size_t outs = plan.results.size();
  RowArrays lent(outs + plan.args.size());
  const bool ok = CallLent(plan, out, lent.args(), args, targets);
  // In any case, since views may have escaped.
  const auto is_held = [&lent](size_t leaf) { return IsHeld(lent.args()[leaf]); };
  if (AllReturned(plan, is_held)) return ok;
  // While the values are still there.
  for (size_t i = 0; i < outs + plan.args.size(); ++i) {
    PyObject* array = lent.args()[i];
    if (array == nullptr) continue;
    Disown(array, i < outs ? plan.results[i] : plan.args[i - outs]);
  }
  return false;
}

}  // namespace

bool InitCallKind() {
  Ref name = Ref::Steal(PyUnicode_InternFromString("out"));
  g_out_keyword = name ? PyTuple_Pack(1, name.get()) : nullptr;
  return g_out_keyword != nullptr;
}

/// Runs one row with arguments that the function owns .
bool RunCopied(const Plan& plan, char* const* args, char* const* targets) {
  const size_t n = plan.args.size();
  RowArrays row(n);
  for (size_t i = 0; i < n; ++i) {
    const Leaf& leaf = plan.args[i];
    Ref array = OwnedArray(leaf, args[i], plan.spares[i].Take());
    row.args()[i] = Converted(leaf, std::move(array)).release();
    if (row.args()[i] == nullptr) return false;
  }
  // In a block of its own: the value may hold the arguments, which AsMade below
  // would then see as kept.
  {
    Ref value = row.Pass(plan.function, n);
    if (!value || !StoreResults(plan, value.get(), targets)) return false;
  }
  for (size_t i = 0; i < n; ++i) {
    const Leaf& leaf = plan.args[i];
    if (leaf.row_bytes > kSpareBytes || !AsMade(row.args()[i], leaf)) continue;
    plan.spares[i].Keep(Ref::Steal(std::exchange(row.args()[i], nullptr)));
  }
  return true;
}

std::unique_ptr<const Kind> CallKind::For(const Plan&) const {
  return std::make_unique<CallKind>(*this);
}

bool CallKind::Run(const Execution& execution, ActiveCall& call, Progress*) const {
  const Plan& plan = execution.plan;
  const auto run_row = [&](char* const* args, char* const* targets) {
    if (lend == Lend::kCopy) return RunCopied(plan, args, targets);
    return RunLent(plan, lend == Lend::kOut, args, targets);
  };
  return RunRows(execution, call, FailedRow::kEndsCall, run_row);
}

}  // namespace hostcall
