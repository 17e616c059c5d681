#include "invoke/run_rows.h"

#include <utility>
#include <vector>

#include "plan/arrays.h"

namespace hostcall {
namespace {

/// Arguments of fewer bytes than this are sent with each row.
constexpr int64_t kSharedBytes = 32 * 1024;

/// Whether all rows get the same array object, which the runner then sends to other
/// processes only once (_policies/on_executor.py). Nobody writes to it here, since
/// the function runs there.
bool IsShared(const Plan& plan, const Leaf& leaf) {
  return plan.sends && leaf.rows == 1 && leaf.row_bytes >= kSharedBytes &&
         !leaf.convert;
}

/// The arguments of one row as a tuple. `shared` has those that all rows get. Null
/// with a Python error set.
Ref TupleOfRow(const Plan& plan, char* const* args, std::vector<Ref>& shared) {
  Ref row = Ref::Steal(PyTuple_New(static_cast<Py_ssize_t>(plan.args.size())));
  for (size_t i = 0; row && i < plan.args.size(); ++i) {
    const Leaf& leaf = plan.args[i];
    Ref array = shared[i];
    if (!array) array = Converted(leaf, OwnedArray(leaf, args[i]));
    if (!array) return Ref();
    if (IsShared(plan, leaf)) shared[i] = array;
    PyTuple_SET_ITEM(row.get(), static_cast<Py_ssize_t>(i), array.release());
  }
  return row;
}

/// The position of a row as a tuple. Null with a Python error set.
Ref TupleOfIndex(const std::vector<int64_t>& index) {
  Ref tuple = Ref::Steal(PyTuple_New(static_cast<Py_ssize_t>(index.size())));
  for (size_t i = 0; tuple && i < index.size(); ++i) {
    PyObject* number = PyLong_FromLongLong(index[i]);
    if (number == nullptr) return Ref();
    PyTuple_SET_ITEM(tuple.get(), static_cast<Py_ssize_t>(i), number);
  }
  return tuple;
}

/// False with a Python error set, also if there is no item.
bool Append(const Ref& list, const Ref& item) {
  return item && PyList_Append(list.get(), item.get()) == 0;
}

}  // namespace

bool RunTogether(const Plan& plan, Rows& walk) {
  const Ref rows = Ref::Steal(PyList_New(0));
  const Ref indices = Ref::Steal(PyList_New(0));
  if (!rows || !indices) return false;
  // For each wanted row, where its results go.
  std::vector<std::vector<char*>> targets;
  std::vector<Ref> shared(plan.args.size());
  Counters::Part& counters = plan.counters->mine();
  do {
    if (!walk.is_wanted()) {
      walk.Fill();
      continue;
    }
    if (!Append(rows, TupleOfRow(plan, walk.args(), shared))) return false;
    if (!Append(indices, TupleOfIndex(walk.index()))) return false;
    char* const* out = walk.targets();
    targets.emplace_back(out, out + plan.results.size());
    counters.calls.Add(1);
    counters.bytes_in.Add(plan.bytes_in);
  } while (walk.Next());
  if (targets.empty()) return true;
  const Ref values = Call(plan.runner.get(), rows, indices);
  if (!values) return false;
  if (!PyList_CheckExact(values.get()) ||
      static_cast<size_t>(PyList_GET_SIZE(values.get())) != targets.size()) {
    PyErr_SetString(PyExc_SystemError,
                    "hostcall: the runner returned a different number of rows");
    return false;
  }
  for (size_t i = 0; i < targets.size(); ++i) {
    Ref value =
        Ref::Borrow(PyList_GET_ITEM(values.get(), static_cast<Py_ssize_t>(i)));
    if (!StoreResults(plan, value.get(), targets[i].data())) return false;
    counters.bytes_out.Add(plan.bytes_out);
  }
  return true;
}

}  // namespace hostcall
