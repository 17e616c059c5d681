#include "invoke/buffer_kind.h"

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/code.h"
#include "buffer/buffer_object.h"
#include "buffer/marks.h"
#include "invoke/run_rows.h"
#include "plan/arrays.h"

namespace hostcall {
namespace {

/// What debug mode found at a row.
struct Findings {
  int changed = -1;    ///< an argument that was written to, or -1
  int unwritten = -1;  ///< a result that was not written, or -1
  bool ok() const { return changed < 0 && unwritten < 0; }
};

/// Sets the Python error for an input that was written to: `on_changed` raises.
void RaiseChanged(const Plan& plan, size_t arg) {
  CallMethod(plan.hooks, "on_changed", Ref::Steal(PyLong_FromSize_t(arg)));
}

/// The context and the Buffers of one row, in the order of the function's
/// arguments: the context, the results, the arguments. They are the plan's spares
/// if those are free, and go back there unless somebody still holds them, so the
/// steady state allocates no objects.
class OpenBuffers {
 public:
  OpenBuffers(const Plan& plan, const ActiveCall& call)
      : plan_(plan), call_(call), outs_(plan.results.size()), stack_(size()) {}

  /// Opens all over the memory of one row. False with a Python error set. Close is
  /// called in any case: Buffers that were kept must not reach XLA's memory.
  bool Open(char* const* args, char* const* targets) {
    for (size_t i = 0; i < size(); ++i) {
      PyObject* object = plan_.spares[i].Take().release();
      if (object == nullptr) {
        object = i == 0 ? New<ContextObject>() : New<BufferObject>();
      }
      if (object == nullptr) return false;
      stack()[i] = object;
      opened_ = i + 1;
      if (i == 0) {
        nanobind::inst_ptr<ContextObject>(object)->lease.Begin(call_);
        continue;
      }
      const bool out = i <= outs_;
      const size_t number = out ? i - 1 : i - 1 - outs_;
      BufferObject* buffer = AsBuffer(object);
      buffer->leaf = out ? &plan_.results[number] : &plan_.args[number];
      buffer->data = out ? targets[number] : args[number];
      buffer->writeable = out;
      buffer->lease.Begin(call_);
    }
    return true;
  }

  /// Ends the call: checks that no view was kept and no input was written to, and
  /// closes everything. `ok` says that no Python error is set; returns the same for
  /// afterwards. An error that is set stays set, unless a view was kept: then the
  /// error says that.
  bool Close(bool ok) {
    // First, so that no new view comes into being while those that were kept are
    // looked for.
    for (size_t i = 1; i < opened_; ++i) AsBuffer(stack()[i])->lease.End();
    const auto lent = [this](size_t leaf) {
      return 1 + leaf < opened_ && IsLent(stack()[1 + leaf]);
    };
    ok = AllReturned(plan_, lent) && ok;
    // WasChanged first: it restores the values of every input, even after an error.
    for (size_t i = 1 + outs_; i < opened_; ++i) {
      if (!WasChanged(AsBuffer(stack()[i])) || !ok) continue;
      RaiseChanged(plan_, i - 1 - outs_);
      ok = false;
    }
    for (size_t i = 0; i < opened_; ++i) {
      if (i == 0) nanobind::inst_ptr<ContextObject>(stack()[0])->lease.End();
      if (i == 0 ? IsHeldElsewhere(stack()[0]) : !CloseBuffer(stack()[i])) continue;
      plan_.spares[i].Keep(Ref::Steal(std::exchange(stack()[i], nullptr)));
    }
    return ok;
  }

  Ref Pass(const Ref& function) { return stack_.Pass(function, size()); }

 private:
  PyObject** stack() { return stack_.args(); }
  size_t size() const { return 1 + outs_ + plan_.args.size(); }

  const Plan& plan_;
  const ActiveCall& call_;
  size_t outs_;        ///< number of results
  size_t opened_ = 0;  ///< so many objects are open, from the first
  RowArrays stack_;
};

/// Whether the function returned None; else sets a Python error, if none is set.
bool ReturnedNothing(PyObject* value) {
  if (value == nullptr) return false;
  if (value == Py_None) return true;
  PyErr_Format(
      PyExc_ValueError,
      "buffer_callback callback must not return any values. It returned %R: "
      "write to `out`, and end with `return None` (a lambda returns what "
      "NumPy's functions return, which is their `out=`)",
      Py_TYPE(value));
  return false;
}

/// Sets the Python error for findings that are not ok.
void RaiseFindings(const Plan& plan, const Findings& findings) {
  if (findings.changed >= 0) return RaiseChanged(plan, findings.changed);
  RaiseUnwritten(plan, findings.unwritten);
}

/// Debug mode on the host: fills the outputs with marks, and copies the inputs.
class Watch {
 public:
  Watch(const Plan& plan, char* const* args, char* const* targets) : args_(args) {
    for (size_t i = 0; i < plan.results.size(); ++i) {
      const Leaf& leaf = plan.results[i];
      const int64_t bytes = leaf.row_bytes;
      marks_.emplace_back();
      if (plan.kind->Aliases(i)) continue;  // it holds an argument's values
      FillBytes(targets[i], bytes < 4 ? 0 : 0xE5, static_cast<size_t>(bytes));
      const bool floats =
          leaf.descr()->kind == 'f' && PyDataType_ELSIZE(leaf.descr()) == 4;
      marks_[i] = Marks(targets[i], bytes, floats || bytes < 8 ? 4 : 8, bytes);
    }
    for (size_t i = 0; i < plan.args.size(); ++i) {
      const int64_t bytes = plan.kind->IsShared(i) ? 0 : plan.args[i].row_bytes;
      before_.emplace_back(args[i], args[i] + bytes);
    }
  }

  /// Looks for an input that was written to, whose values it restores, and for an
  /// output that was not written. Needs no GIL.
  Findings Look() const {
    for (size_t i = 0; i < before_.size(); ++i) {
      const std::vector<char>& before = before_[i];
      if (before.empty() ||
          std::memcmp(args_[i], before.data(), before.size()) == 0) {
        continue;
      }
      CopyBytes(args_[i], before.data(), before.size());
      return {static_cast<int>(i), -1};
    }
    for (size_t i = 0; i < marks_.size(); ++i) {
      if (!marks_[i].Overwritten()) return {-1, static_cast<int>(i)};
    }
    return {};
  }

 private:
  char* const* args_;
  std::vector<Marks> marks_;  ///< of the outputs
  /// Copies of the inputs; empty for one that shares a result's memory.
  std::vector<std::vector<char>> before_;
};

/// Prepares one row's memory on the host. In debug mode, returns the object that
/// watches it. Otherwise clears small outputs, so that one that the function does
/// not write is zeros; clearing large ones would cost as much as writing them.
std::unique_ptr<Watch> Prepare(const BufferKind& kind, const Plan& plan,
                               char* const* args, char* const* targets) {
  if (kind.debug) return std::make_unique<Watch>(plan, args, targets);
  for (size_t i = 0; i < plan.results.size(); ++i) {
    const Leaf& leaf = plan.results[i];
    if (leaf.row_bytes > kZeroBytes || kind.Aliases(i)) continue;
    FillBytes(targets[i], 0, static_cast<size_t>(leaf.row_bytes));
  }
  return nullptr;
}

/// Calls the function on one row. False with a Python error set.
bool RunOnBuffers(const BufferKind& kind, const Plan& plan, const ActiveCall& call,
                  char* const* args, char* const* targets) {
  std::unique_ptr<Watch> watch;
  if (!call.on_gpu()) watch = Prepare(kind, plan, args, targets);
  OpenBuffers buffers(plan, call);
  bool ok = buffers.Open(args, targets);
  if (ok) {
    ok = ReturnedNothing(buffers.Pass(plan.function).get());
  }
  ok = buffers.Close(ok);
  if (!ok || !watch) return ok;
  const Findings findings = watch->Look();
  if (findings.ok()) return true;
  RaiseFindings(plan, findings);
  return false;
}

/// Native code that has failed, which only Python can say.
struct NativeFailure final : Progress {
  int32_t status = 0;        ///< what it returned; 0 is success
  Findings findings;         ///< of debug mode
  std::vector<int64_t> row;  ///< the position of the row that failed; may be empty

  /// Sets the Python error. The GIL is held.
  void Raise(const Plan& plan) const {
    if (!findings.ok()) return RaiseFindings(plan, findings);
    std::string text;
    for (int64_t index : row) {
      text += (text.empty() ? " in row (" : ", ") + std::to_string(index);
    }
    if (!text.empty()) text += ")";
    CallMethod(plan.hooks, "on_status", Ref::Steal(PyLong_FromLong(status)),
               Ref::Steal(PyUnicode_FromString(text.c_str())));
  }
};

/// Runs native code on one row. Returns its status, and sets `*findings` in debug
/// mode.
int32_t RunNativeRow(const BufferKind& kind, const Execution& execution, Rows& rows,
                     Findings* findings) {
  char* const* args = rows.args();
  char* const* targets = rows.targets();
  auto** in = reinterpret_cast<void**>(const_cast<char**>(args));
  auto** out = reinterpret_cast<void**>(const_cast<char**>(targets));
  std::unique_ptr<Watch> watch;
  if (execution.stream == nullptr) {
    watch = Prepare(kind, execution.plan, args, targets);
  }
  // The native code may take two or three parameters, and return a status or
  // nothing. In the C calling conventions of the machines that JAX runs on, a
  // function that takes two ignores the third, and one that returns nothing leaves
  // anything in the register of the status.
  using Native = int32_t (*)(void**, void**, void*);
  const auto native = reinterpret_cast<Native>(kind.address);
  const int32_t returned = native(out, in, execution.stream);
  const int32_t status = kind.status ? returned : 0;
  if (watch && status == 0) *findings = watch->Look();
  return status;
}

}  // namespace

std::unique_ptr<const Kind> BufferKind::For(const Plan&) const {
  auto kind = std::make_unique<BufferKind>(*this);
  kind->has_native_part = address != 0;
  return kind;
}

size_t BufferKind::SpareCount(const Plan& plan) const {
  return 1 + plan.results.size() + plan.args.size();
}

bool BufferKind::RunNative(const Execution& execution,
                           std::unique_ptr<Progress>* progress) const {
  const Plan& plan = execution.plan;
  if (plan.rows == 0) return true;
  const bool on_gpu = execution.stream != nullptr;
  Rows rows(plan, execution.operands, execution.results, on_gpu);
  int64_t calls = 0;
  int32_t code = 0;
  Findings findings;
  do {
    ++calls;
    code = RunNativeRow(*this, execution, rows, &findings);
  } while (code == 0 && findings.ok() && rows.Next());
  plan.counters->native_calls.fetch_add(calls, std::memory_order_relaxed);
  if (code == 0 && findings.ok()) {
    rows.Finish();
    return true;
  }
  auto failure = std::make_unique<NativeFailure>();
  failure->status = code;
  failure->findings = findings;
  failure->row = rows.index();
  *progress = std::move(failure);
  return false;
}

bool BufferKind::Run(const Execution& execution, ActiveCall& call,
                     Progress* progress) const {
  const Plan& plan = execution.plan;
  if (progress != nullptr) {
    static_cast<const NativeFailure&>(*progress).Raise(plan);
    return false;
  }
  const auto run_row = [&](char* const* args, char* const* targets) {
    return RunOnBuffers(*this, plan, call, args, targets);
  };
  return RunRows(execution, call, FailedRow::kEndsCall, run_row);
}

}  // namespace hostcall
