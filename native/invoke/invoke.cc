#include "invoke/invoke.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <new>
#include <utility>
#include <vector>

#include "buffer/buffer_call.h"
#include "buffer/marks.h"
#include "plan/arrays.h"
#include "plan/feed_take.h"
#include "plan/rows.h"

namespace nb = nanobind;

#include "base/bytes.h"

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
Ref Lend(PyObject** lent, const Leaf& leaf, char* data, bool writeable) {
  *lent = LentArray(leaf, data, writeable).release();
  return Ref::Borrow(*lent);
}

/// Runs one row on arrays that the function borrows, the results first, then the
/// arguments. The return value and all other references are dropped before it
/// returns, or the caller would take them for escapes.
bool CallLent(const Plan& plan, PyObject** lent, char* const* args,
              char* const* targets) {
  const size_t n = plan.args.size(), outs = plan.results.size();
  const bool out = plan.lend == Lend::kOut;
  RowArrays row(n);
  for (size_t i = 0; i < n; ++i) {
    const Leaf& leaf = plan.args[i];
    Ref array = Lend(&lent[outs + i], leaf, args[i], false);
    row.args()[i] = Converted(leaf, std::move(array)).release();
    if (row.args()[i] == nullptr) return false;
  }
  std::vector<Marks> marks;
  if (out) {
    Ref list = Ref::Steal(PyList_New(static_cast<Py_ssize_t>(outs)));
    if (!list) return false;
    for (size_t i = 0; i < outs; ++i) {
      marks.push_back(MarksIn(plan.results[i], targets[i]));
      Ref array = Lend(&lent[i], plan.results[i], targets[i], true);
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

/// Runs one row with lent arguments (Lend::kArgs and kOut).
bool RunLent(const Plan& plan, char* const* args, char* const* targets) {
  const size_t outs = plan.results.size();
  RowArrays lent(outs + plan.args.size());
  const bool ok = CallLent(plan, lent.args(), args, targets);
  // In any case, since views may have escaped.
  const auto held = [&lent](size_t leaf) { return IsHeld(lent.args()[leaf]); };
  if (AllReturned(plan, held)) return ok;
  // While the values are still there.
  for (size_t i = 0; i < outs + plan.args.size(); ++i) {
    PyObject* array = lent.args()[i];
    if (array == nullptr) continue;
    Disown(array, i < outs ? plan.results[i] : plan.args[i - outs]);
  }
  return false;
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
bool RunInOrder(const Plan& plan, ActiveCall& call, Rows& rows) {
  const RowMark mark(call, &rows.index());
  bool ok = true;
  do {
    if (!rows.wanted()) {
      rows.Fill();
    } else if (!RunRow(plan, call, rows.args(), rows.targets())) {
      // A row of a tap that fails does not stop the rows after it, since no program
      // fails. Ctrl-C stops them.
      if (plan.tap && !PyErr_ExceptionMatches(PyExc_KeyboardInterrupt)) {
        call.FailedAt(rows.index());
        TakeError(plan, call);
      } else {
        ok = false;
      }
    } else if (PyErr_CheckSignals() != 0) {  // Ctrl-C during this row
      ok = false;
    }
  } while (ok && rows.Next());
  if (!ok) call.FailedAt(rows.index());
  return ok;
}

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

/// Hands all rows to the plan's runner at once. False with a Python error set.
bool RunTogether(const Plan& plan, Rows& walk) {
  const Ref rows = Ref::Steal(PyList_New(0));
  const Ref indices = Ref::Steal(PyList_New(0));
  if (!rows || !indices) return false;
  // For each wanted row, where its results go.
  std::vector<std::vector<char*>> targets;
  std::vector<Ref> shared(plan.args.size());
  Counters::Part& counters = plan.counters->mine();
  do {
    if (!walk.wanted()) {
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
      call.FailedAt(take.row());
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
      UnpackBits(packed, row, leaf.count, leaf.bits, leaf.is_signed);
    });
  } else if (leaf.row_bytes == 4) {  // a copy of a known size is one instruction
    each([](char* row, const char* value) { std::memcpy(row, value, 4); });
  } else if (leaf.row_bytes == 8) {
    each([](char* row, const char* value) { std::memcpy(row, value, 8); });
  } else {
    const auto bytes = static_cast<size_t>(leaf.row_bytes);
    each([bytes](char* row, const char* value) { CopyBytes(row, value, bytes); });
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
    Ref array = ArrayOfRows(leaf, {rows});
    if (!array) return false;
    {
      // Nobody else has a reference to the array, and the events are the worker's.
      GilRelease release(leaf.row_bytes * rows >= kReleaseBytes);
      CopyRun(leaf, plan.layout.offsets[masks + i], first, count,
              PyArray_BYTES(reinterpret_cast<PyArrayObject*>(array.get())));
    }
    run.args()[i] = Converted(leaf, std::move(array)).release();
    if (run.args()[i] == nullptr) return false;
  }
  plan.counters->mine().calls.Add(rows);
  plan.counters->mine().bytes_in.Add(rows * plan.bytes_in);
  return static_cast<bool>(run.Pass(plan.function, n));
}

bool Invoke(const Plan& plan, ActiveCall& call, const void* const* operands,
            void* const* results) {
  Graveyard::Get().Bury();  // the GIL is held, as destroying plans requires
  if (plan.rows == 0) return true;
  if (plan.called_by_other_process) {  // another process fills the results
    return static_cast<bool>(Call(plan.function.get()));
  }
  if (plan.feed) return TakeItems(plan, call);
  // The common case: one row, nothing packed, nothing masked.
  if (plan.grid.empty() && !plan.packed && !plan.runner) {
    // The const_cast is safe: of the arrays that the function gets, only lent ones
    // lie in the operands, and those are read-only.
    auto* args = const_cast<char* const*>(
        reinterpret_cast<const char* const*>(operands) + (plan.masked ? 1 : 0));
    return RunRow(plan, call, args, reinterpret_cast<char* const*>(results));
  }
  Rows rows(plan, operands, results, call.on_gpu());
  const bool ok =
      plan.runner ? RunTogether(plan, rows) : RunInOrder(plan, call, rows);
  if (ok) rows.Finish();
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

bool Masked(const Plan& plan, int device, int64_t run, const void* const* operands,
            void* const* results, int64_t* execution) {
  if (plan.executions) {
    // Of a team, any device may lead, but all pass with the same arguments.
    const int owner = plan.team && plan.team->mode == TeamMode::kOnce ? -1 : device;
    try {
      *execution = plan.executions->Count(owner, run);
    } catch (const std::bad_alloc&) {
      // This execution is not counted. A team must not be left by an exception: its
      // other devices would wait for ever.
    }
  }
  return FilledForMask(plan, operands, results);
}

namespace {

// The exception that is set, with its traceback, which it clears; null if none is.
Ref TakeRaised() {
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  if (value != nullptr && trace != nullptr) PyException_SetTraceback(value, trace);
  Ref held_type = Ref::Steal(type), held_trace = Ref::Steal(trace);
  return Ref::Steal(value);
}

/// What is said of an exception whose report failed, with the error of the report
/// set, which goes to sys.unraisablehook. It needs no Python code of hostcall's:
/// the report may have failed because the stack is full (RecursionError).
std::string TextWithoutHelp(const Plan& plan, const Ref& raised) {
  PyErr_WriteUnraisable(plan.hooks.get());
  std::string said = Py_TYPE(raised.get())->tp_name;
  const Ref message = Ref::Steal(PyObject_Str(raised.get()));
  const char* utf8 = message ? PyUnicode_AsUTF8(message.get()) : nullptr;
  if (utf8 != nullptr && *utf8 != 0) said += std::string(": ") + utf8;
  PyErr_Clear();
  return said + " (in a callback; hostcall failed to report more of it)";
}

}  // namespace

std::string TakeError(const Plan& plan, const ActiveCall& call) {
  plan.counters->mine().errors.Add(1);
  const Ref raised = TakeRaised();
  if (!raised) return "hostcall: a call failed without an error message";
  const nb::object row = nb::tuple(nb::cast(call.failed_row));
  Ref text = Ask(plan.hooks, "on_error", raised, row.ptr());
  // Ctrl-C and SystemExit may come while a failure is reported, and the exception's
  // own methods run then. Only these are reported in its place: nothing else that
  // fails here may hide what the function raised.
  if (!text && !PyErr_ExceptionMatches(PyExc_Exception)) {
    if (const Ref newer = TakeRaised()) {
      Ref before = Ref::Steal(PyException_GetContext(newer.get()));
      if (!before && newer.get() != raised.get()) {
        PyException_SetContext(newer.get(), Py_NewRef(raised.get()));
      }
      text = Ask(plan.hooks, "on_error", newer, row.ptr());
    }
  }
  const char* utf8 = text ? PyUnicode_AsUTF8(text.get()) : nullptr;
  return utf8 != nullptr ? utf8 : TextWithoutHelp(plan, raised);
}

void WarnOfLoneFailure(const Plan& plan, int ordinal, const std::string& error) {
  Ref device = Ref::Steal(PyLong_FromLong(ordinal));
  Ref text = Ref::Steal(PyUnicode_DecodeUTF8(
      error.data(), static_cast<Py_ssize_t>(error.size()), "replace"));
  if (!Ask(plan.hooks, "on_lone_failure", device, text)) {
    PyErr_WriteUnraisable(plan.hooks.get());
  }
}

}  // namespace hostcall
