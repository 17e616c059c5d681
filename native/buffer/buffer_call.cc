#include "buffer/buffer_call.h"

#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "base/bytes.h"
#include "base/code.h"
#include "buffer/buffer_object.h"
#include "buffer/marks.h"
#include "plan/arrays.h"
#include "plan/rows.h"

namespace hostcall {
namespace {

/// Sets the Python error for an input that was written to: `on_changed` raises.
void RaiseChanged(const Plan& plan, size_t arg) {
  Ask(plan.hooks, "on_changed", Ref::Steal(PyLong_FromSize_t(arg)));
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

/// Debug mode on the host: fills the outputs with marks, and copies the inputs.
class Watch {
 public:
  Watch(const Plan& plan, char* const* args, char* const* targets) : args_(args) {
    for (size_t i = 0; i < plan.results.size(); ++i) {
      const Leaf& leaf = plan.results[i];
      const int64_t bytes = leaf.row_bytes;
      marks_.emplace_back();
      if (plan.buffers.Aliases(i)) continue;  // it holds an argument's values
      FillBytes(targets[i], bytes < 4 ? 0 : 0xE5, static_cast<size_t>(bytes));
      const bool floats =
          leaf.descr()->kind == 'f' && PyDataType_ELSIZE(leaf.descr()) == 4;
      marks_[i] = Marks(targets[i], bytes, floats || bytes < 8 ? 4 : 8, bytes);
    }
    for (size_t i = 0; i < plan.args.size(); ++i) {
      const int64_t bytes = plan.buffers.Shares(i) ? 0 : plan.args[i].row_bytes;
      before_.emplace_back(args[i], args[i] + bytes);
    }
  }

  /// Looks for an input that was written to, whose values it restores, and for an
  /// output that was not written. Needs no GIL.
  NativeStatus Look() const {
    NativeStatus found;
    for (size_t i = 0; i < before_.size(); ++i) {
      const std::vector<char>& was = before_[i];
      if (was.empty() || std::memcmp(args_[i], was.data(), was.size()) == 0)
        continue;
      CopyBytes(args_[i], was.data(), was.size());
      found.changed = static_cast<int>(i);
      return found;
    }
    for (size_t i = 0; found.ok() && i < marks_.size(); ++i) {
      if (!marks_[i].Overwritten()) found.unwritten = static_cast<int>(i);
    }
    return found;
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
std::unique_ptr<Watch> Prepare(const Plan& plan, char* const* args,
                               char* const* targets) {
  if (plan.buffers.debug) return std::make_unique<Watch>(plan, args, targets);
  for (size_t i = 0; i < plan.results.size(); ++i) {
    const Leaf& leaf = plan.results[i];
    if (leaf.row_bytes > kZeroBytes || plan.buffers.Aliases(i)) continue;
    FillBytes(targets[i], 0, static_cast<size_t>(leaf.row_bytes));
  }
  return nullptr;
}

}  // namespace

bool RunOnBuffers(const Plan& plan, const ActiveCall& call, char* const* args,
                  char* const* targets) {
  std::unique_ptr<Watch> watch;
  if (!call.on_gpu()) watch = Prepare(plan, args, targets);
  OpenBuffers buffers(plan, call);
  bool ok = buffers.Open(args, targets);
  if (ok) {
    ok = ReturnedNothing(buffers.Pass(plan.function).get());
  }
  ok = buffers.Close(ok);
  if (!ok || !watch) return ok;
  const NativeStatus found = watch->Look();
  if (found.ok()) return true;
  RaiseStatus(plan, found);
  return false;
}

NativeStatus RunNative(const Plan& plan, const void* const* operands,
                       void* const* results, void* stream) {
  NativeStatus status;
  if (plan.rows == 0) return status;
  const bool on_gpu = stream != nullptr;
  Rows rows(plan, operands, results, on_gpu);
  int64_t calls = 0;
  do {
    char* const* args = rows.args();
    char* const* targets = rows.targets();
    auto** in = reinterpret_cast<void**>(const_cast<char**>(args));
    auto** out = reinterpret_cast<void**>(const_cast<char**>(targets));
    ++calls;
    std::unique_ptr<Watch> watch;
    if (!on_gpu) watch = Prepare(plan, args, targets);
    // The native code may take two or three parameters, and return a status or
    // nothing. In the C calling conventions of the machines that JAX runs on, a
    // function that takes two ignores the third, and one that returns nothing
    // leaves anything in the register of the status.
    using Native = int32_t (*)(void**, void**, void*);
    const int32_t number =
        reinterpret_cast<Native>(plan.buffers.address)(out, in, stream);
    if (plan.buffers.status) status.number = number;
    if (watch && status.ok()) status = watch->Look();
  } while (status.ok() && rows.Next());
  plan.counters->native_calls.fetch_add(calls, std::memory_order_relaxed);
  if (status.ok()) {
    rows.Finish();
  } else {
    status.row = rows.index();
  }
  return status;
}

void RaiseStatus(const Plan& plan, const NativeStatus& status) {
  if (status.changed >= 0) return RaiseChanged(plan, status.changed);
  if (status.unwritten >= 0) return RaiseUnwritten(plan, status.unwritten);
  std::string row;
  for (int64_t index : status.row) {
    row += (row.empty() ? " in row (" : ", ") + std::to_string(index);
  }
  if (!row.empty()) row += ")";
  Ask(plan.hooks, "on_status", Ref::Steal(PyLong_FromLong(status.number)),
      Ref::Steal(PyUnicode_FromString(row.c_str())));
}

}  // namespace hostcall
