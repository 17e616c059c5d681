#include "invoke/invoke.h"

#include <cstring>
#include <memory>
#include <utility>

#include "buffer/buffer_call.h"
#include "invoke/results.h"
#include "plan/arrays.h"
#include "plan/feed_take.h"
#include "plan/rows.h"

namespace hostcall {
namespace {

/// The names of a vectorcall's keywords: ("out",). Set by InitInvoke; kept for
/// ever.
PyObject* g_out_keyword = nullptr;

/// Runs one row with arguments that the function owns (Lend::kCopy).
bool RunCopied(const Plan& plan, char* const* args, char* const* targets) {
  const size_t n = plan.args.size();
  RowArrays row(n);
  for (size_t i = 0; i < n; ++i) {
    row.args()[i] =
        OwnedArray(plan.args[i], args[i], plan.spares[i].Take()).release();
    if (row.args()[i] == nullptr) return false;
    if (!Convert(plan.args[i], &row.args()[i])) return false;
  }
  // In a block of its own: the value may hold the arguments, which AsMade below
  // would then see as kept.
  {
    Ref value = Ref::Steal(CallPython(plan.function.get(), row.args(),
                                      n | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
    if (!value || !StoreResults(plan, value.get(), targets)) return false;
  }
  for (size_t i = 0; i < n; ++i) {
    const Leaf& leaf = plan.args[i];
    if (leaf.row_bytes > kSpareBytes || !AsMade(row.args()[i], leaf)) continue;
    plan.spares[i].Keep(Ref::Steal(std::exchange(row.args()[i], nullptr)));
  }
  return true;
}

/// Runs one row on the arrays of a loan, which the caller ends. The return value
/// and all references of its own are dropped before it returns, or the loan would
/// take them for escapes.
bool CallLent(const Plan& plan, Loan& loan, char* const* args,
              char* const* targets) {
  const size_t n = plan.args.size();
  RowArrays row(n);
  for (size_t i = 0; i < n; ++i) {
    PyObject* array = loan.Lend(i, false, args[i]);
    if (array == nullptr) return false;
    Py_INCREF(array);
    row.args()[i] = array;
    if (!Convert(plan.args[i], &row.args()[i])) return false;
  }
  std::vector<Canaries> canaries;  // marks in the `out` arrays (plan/arrays.h)
  Ref outs;
  if (plan.lend == Lend::kOut) {
    outs = Ref::Steal(PyList_New(static_cast<Py_ssize_t>(plan.results.size())));
    if (!outs) return false;
    for (size_t i = 0; i < plan.results.size(); ++i) {
      const Leaf& leaf = plan.results[i];
      canaries.emplace_back(targets[i], leaf.row_bytes,
                            PyDataType_ELSIZE(leaf.descr()));
      PyObject* array = loan.Lend(i, true, targets[i]);
      if (array == nullptr) return false;
      Py_INCREF(array);
      PyList_SET_ITEM(outs.get(), static_cast<Py_ssize_t>(i), array);
    }
    row.args()[n] = Call(plan.out_tree.get(), outs).release();
    if (row.args()[n] == nullptr) return false;
  }
  Ref value = Ref::Steal(CallPython(
      plan.function.get(), row.args(), n | PY_VECTORCALL_ARGUMENTS_OFFSET,
      plan.lend == Lend::kOut ? g_out_keyword : nullptr));
  if (!value) return false;
  if (plan.lend == Lend::kOut && value.get() == Py_None) {
    for (size_t i = 0; i < canaries.size(); ++i) {
      if (canaries[i].Overwritten()) continue;
      RaiseUnwritten(plan, i);
      return false;
    }
    return true;
  }
  return StoreResults(plan, value.get(), targets);
}

/// Runs one row with lent arguments (Lend::kArgs and kOut).
bool RunLent(const Plan& plan, char* const* args, char* const* targets) {
  Loan loan(plan);
  const bool ok = CallLent(plan, loan, args, targets);
  return loan.End() && ok;  // End runs in any case: it looks for escaped views
}

/// Runs the function on one row. False with a Python error set.
bool RunRow(const Plan& plan, const ActiveCall& call, char* const* args,
            char* const* targets) {
  Counters::Part& counters = plan.counters->mine();
  counters.calls.Add(1);
  counters.bytes_in.Add(plan.bytes_in);
  bool ok;
  switch (plan.lend) {
    case Lend::kCopy:
      ok = RunCopied(plan, args, targets);
      break;
    case Lend::kBuffers:
      ok = RunOnBuffers(plan, call, args, targets);
      break;
    default:
      ok = RunLent(plan, args, targets);
  }
  if (ok) counters.bytes_out.Add(plan.bytes_out);
  return ok;
}

/// Runs the function on one row after another. The first that fails ends the call,
/// except for a tap. False with a Python error set.
bool RunInOrder(const Plan& plan, ActiveCall& call, const bool* mask,
                HostView& view) {
  Rows rows(plan, mask, view);
  const RowMark mark(call, &rows.index());  // ends before `rows`
  bool ok = true;
  do {
    if (!rows.wanted()) {
      rows.Fill();
    } else if (!RunRow(plan, call, rows.args(), rows.targets())) {
      // A row of a tap that fails does not stop the rows after it, since no program
      // fails. Ctrl-C stops them.
      if (plan.tap && !PyErr_ExceptionMatches(PyExc_KeyboardInterrupt)) {
        call.failed_row = rows.index();
        TakeError(plan, call);
      } else {
        ok = false;
      }
    } else if (PyErr_CheckSignals() != 0) {  // Ctrl-C during this row
      ok = false;
    }
  } while (ok && rows.Next());
  if (!ok) call.failed_row = rows.index();
  return ok;
}

/// A position as a Python tuple. Null with a Python error set.
Ref IndexTuple(const std::vector<int64_t>& index) {
  Ref tuple = Ref::Steal(PyTuple_New(static_cast<Py_ssize_t>(index.size())));
  for (size_t i = 0; tuple && i < index.size(); ++i) {
    PyObject* item = PyLong_FromLongLong(index[i]);
    if (item == nullptr) return Ref();
    PyTuple_SET_ITEM(tuple.get(), static_cast<Py_ssize_t>(i), item);
  }
  return tuple;
}

/// Arguments of fewer bytes than this are sent with each row.
constexpr int64_t kSharedBytes = 32 * 1024;

/// Whether all rows get the same array object, which the runner then sends to other
/// processes only once (_runtime/rows.py). Nobody writes to it here, since the
/// function runs there.
bool IsShared(const Plan& plan, const Leaf& leaf) {
  return plan.sends && leaf.rows == 1 && leaf.row_bytes >= kSharedBytes &&
         !leaf.convert;
}

/// Hands all rows to the plan's runner at once. False with a Python error set.
bool RunTogether(const Plan& plan, const bool* mask, HostView& view) {
  Ref rows = Ref::Steal(PyList_New(0)), indices = Ref::Steal(PyList_New(0));
  if (!rows || !indices) return false;
  std::vector<Bases> targets;  // for each wanted row, where its results go
  std::vector<Ref> shared(plan.args.size());
  Rows walk(plan, mask, view);
  do {
    if (!walk.wanted()) {
      walk.Fill();
      continue;
    }
    const size_t n = plan.args.size();
    Ref row = Ref::Steal(PyTuple_New(static_cast<Py_ssize_t>(n)));
    if (!row) return false;
    char* const* args = walk.args();
    for (size_t i = 0; i < n; ++i) {
      PyObject* array = nullptr;
      if (shared[i]) {
        array = Ref::Borrow(shared[i].get()).release();
      } else {
        array = OwnedArray(plan.args[i], args[i]).release();
        if (array == nullptr || !Convert(plan.args[i], &array)) return false;
        if (IsShared(plan, plan.args[i])) shared[i] = Ref::Borrow(array);
      }
      PyTuple_SET_ITEM(row.get(), static_cast<Py_ssize_t>(i), array);
    }
    Ref index = IndexTuple(walk.index());
    if (!index || PyList_Append(rows.get(), row.get()) != 0 ||
        PyList_Append(indices.get(), index.get()) != 0) {
      return false;
    }
    char* const* out = walk.targets();
    targets.emplace_back(out, out + plan.results.size());
    plan.counters->mine().calls.Add(1);
    plan.counters->mine().bytes_in.Add(plan.bytes_in);
  } while (walk.Next());
  if (targets.empty()) return true;
  Ref values = Call(plan.runner.get(), rows, indices);
  if (!values) return false;
  if (!PyList_CheckExact(values.get()) ||
      static_cast<size_t>(PyList_GET_SIZE(values.get())) != targets.size()) {
    PyErr_SetString(PyExc_SystemError,
                    "hostcall: the runner returned a different number of rows");
    return false;
  }
  for (size_t i = 0; i < targets.size(); ++i) {
    Ref value = Ref::Borrow(PyList_GET_ITEM(values.get(), i));
    if (!StoreResults(plan, value.get(), targets[i].data())) return false;
    plan.counters->mine().bytes_out.Add(plan.bytes_out);
  }
  return true;
}

/// Takes the items of a feed. While there is none, runs the plan's function, which
/// waits for one, or raises. False with a Python error set.
bool TakeItems(const Plan& plan, ActiveCall& call) {
  FeedTake& take = *call.feed;
  for (;;) {
    {
      GilRelease unlocked;  // an item's bytes are copied in there
      if (take.Go(0)) return true;
    }
    const Ref lane = Ref::Steal(PyLong_FromSize_t(take.lane()));
    if (!Call(plan.function.get(), lane)) {
      call.failed_row = take.row();
      return false;
    }
  }
}

/// Copies one leaf of the events, which begins at `offset` of their payloads, into
/// an array with an axis for the events in front.
void CopyRun(const Leaf& leaf, size_t offset, TapEvent& first, size_t count,
             char* to) {
  TapEvent* event = &first;
  const auto each = [&](auto copy) {
    for (size_t i = 0; i < count; ++i, event = event->next) {
      copy(to, event->payload() + offset);
      to += leaf.row_bytes;
    }
  };
  if (leaf.bits != 0) {
    each([&leaf](char* row, const char* packed) {
      UnpackBits(reinterpret_cast<const uint8_t*>(packed),
                 reinterpret_cast<uint8_t*>(row), leaf.count, leaf.bits,
                 leaf.is_signed);
    });
  } else if (leaf.row_bytes == 4) {  // a copy of a known size is one instruction
    each([](char* row, const char* value) { std::memcpy(row, value, 4); });
  } else if (leaf.row_bytes == 8) {
    each([](char* row, const char* value) { std::memcpy(row, value, 8); });
  } else {
    const auto bytes = static_cast<size_t>(leaf.row_bytes);
    each([bytes](char* row, const char* value) { std::memcpy(row, value, bytes); });
  }
}

}  // namespace

bool InitInvoke() {
  Ref name = Ref::Steal(PyUnicode_InternFromString("out"));
  g_out_keyword = name ? PyTuple_Pack(1, name.get()) : nullptr;
  return g_out_keyword != nullptr;
}

bool InvokeRun(const Plan& plan, TapEvent& first, size_t count) {
  const size_t n = plan.args.size(), masks = plan.masked ? 1 : 0;
  const auto rows = static_cast<int64_t>(count);
  RowArrays run(n);
  for (size_t i = 0; i < n; ++i) {
    const Leaf& leaf = plan.args[i];
    run.args()[i] = ArrayOfRows(leaf, {rows}).release();
    if (run.args()[i] == nullptr) return false;
    auto* array = reinterpret_cast<PyArrayObject*>(run.args()[i]);
    {
      // Nobody else has a reference to the array, and the events are the worker's.
      GilRelease release(leaf.row_bytes * rows >= kReleaseBytes);
      CopyRun(leaf, plan.layout.offsets[masks + i], first, count,
              static_cast<char*>(PyArray_DATA(array)));
    }
    if (!Convert(leaf, &run.args()[i])) return false;
  }
  plan.counters->mine().calls.Add(rows);
  plan.counters->mine().bytes_in.Add(rows * plan.bytes_in);
  return static_cast<bool>(
      Ref::Steal(CallPython(plan.function.get(), run.args(),
                            n | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr)));
}

bool Invoke(const Plan& plan, ActiveCall& call, const void* const* operands,
            void* const* results) {
  Graveyard::Get().Bury();  // the GIL is held, as destroying plans requires
  const bool* mask = plan.masked ? static_cast<const bool*>(operands[0]) : nullptr;
  if (plan.rows == 0) return true;
  if (plan.elsewhere) {  // another process fills the results
    return static_cast<bool>(Call(plan.function.get()));
  }
  if (plan.feed) return TakeItems(plan, call);
  // The common case: one row, nothing packed, nothing masked.
  if (plan.grid.empty() && !plan.packed && !plan.runner) {
    // The const_cast is safe: of the arrays that the function gets, only lent ones
    // lie in the operands, and those are read-only.
    auto* args = const_cast<char* const*>(
        reinterpret_cast<const char* const*>(operands) + (mask ? 1 : 0));
    return RunRow(plan, call, args, reinterpret_cast<char* const*>(results));
  }
  HostView view(plan, operands, results, call.on_gpu());
  const bool ok = plan.runner ? RunTogether(plan, mask, view)
                              : RunInOrder(plan, call, mask, view);
  if (ok) view.Finish();
  return ok;
}

bool FilledForMask(const Plan& plan, const void* const* operands,
                   void* const* results) {
  if (plan.packed || !plan.KeepsBack(operands)) return false;
  // A fill is the memory of a bytes object, which never changes, so it is read
  // without the GIL.
  for (size_t i = 0; i < plan.results.size(); ++i) {
    const Leaf& leaf = plan.results[i];
    char* target = static_cast<char*>(results[i]);
    for (int64_t row = 0; row < leaf.rows; ++row) {
      FillRow(leaf, target + row * leaf.row_bytes);
    }
  }
  plan.counters->masked.fetch_add(plan.rows, std::memory_order_relaxed);
  return true;
}

std::string TakeError(const Plan& plan, const ActiveCall& call) {
  plan.counters->mine().errors.Add(1);
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  if (value == nullptr) return "hostcall: a call failed without an error message";
  if (trace != nullptr) PyException_SetTraceback(value, trace);
  Ref held_type = Ref::Steal(type), held = Ref::Steal(value),
      held_trace = Ref::Steal(trace);
  Ref row = IndexTuple(call.failed_row);
  Ref text = Ask(plan.info, "on_error", held, plan.info, row);
  const char* utf8 = text ? PyUnicode_AsUTF8(text.get()) : nullptr;
  if (utf8 == nullptr) {
    PyErr_WriteUnraisable(plan.info.get());
    return std::string("hostcall: a callback failed with ") +
           (held ? Py_TYPE(held.get())->tp_name : "an error") +
           ", and reporting it failed too";
  }
  return utf8;
}

void WarnOfLoneFailure(const Plan& plan, int ordinal, const std::string& error) {
  Ref device = Ref::Steal(PyLong_FromLong(ordinal));
  Ref text = Ref::Steal(PyUnicode_DecodeUTF8(
      error.data(), static_cast<Py_ssize_t>(error.size()), "replace"));
  if (!Ask(plan.info, "on_lone_failure", device, text)) {
    PyErr_WriteUnraisable(plan.info.get());
  }
}

}  // namespace hostcall
