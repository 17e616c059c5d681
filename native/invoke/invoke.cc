#include "invoke/invoke.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <new>

#include "plan/rows.h"

namespace nb = nanobind;

namespace hostcall {

bool Invoke(const Execution& execution, ActiveCall& call, Progress* progress) {
  Graveyard::Get().Bury();  // the GIL is held, as destroying plans requires
  const Plan& plan = execution.plan;
  if (plan.rows == 0) return true;
  if (plan.called_by_other_process) {  // another process fills the results
    return static_cast<bool>(Call(plan.function.get()));
  }
  return plan.kind->Run(execution, call, progress);
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

bool Masked(const Execution& execution, int64_t* executions_before) {
  const Plan& plan = execution.plan;
  if (plan.executions) {
    // Of a team, any device may lead, but all pass with the same arguments.
    const int owner =
        plan.team && plan.team->mode == TeamMode::kOnce ? -1 : execution.device;
    try {
      *executions_before = plan.executions->Count(owner, execution.run);
    } catch (const std::bad_alloc&) {
      // This execution is not counted. A team must not be left by an exception: its
      // other devices would wait for ever.
    }
  }
  return FilledForMask(plan, execution.operands, execution.results);
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
  std::string text = Py_TYPE(raised.get())->tp_name;
  const Ref message = Ref::Steal(PyObject_Str(raised.get()));
  const char* utf8 = message ? PyUnicode_AsUTF8(message.get()) : nullptr;
  if (utf8 != nullptr && *utf8 != 0) text += std::string(": ") + utf8;
  PyErr_Clear();
  return text + " (in a callback; hostcall failed to report more of it)";
}

}  // namespace

std::string TakeError(const Plan& plan, const ActiveCall& call) {
  plan.counters->mine().errors.Add(1);
  const Ref raised = TakeRaised();
  if (!raised) return "hostcall: a call failed without an error message";
  const nb::object row = nb::tuple(nb::cast(call.failed_row));
  Ref text = CallMethod(plan.hooks, "on_error", raised, row.ptr());
  // Ctrl-C and SystemExit may come while a failure is reported, and the exception's
  // own methods run then. Only these are reported in its place: nothing else that
  // fails here may hide what the function raised.
  if (!text && !PyErr_ExceptionMatches(PyExc_Exception)) {
    if (const Ref newer = TakeRaised()) {
      Ref before = Ref::Steal(PyException_GetContext(newer.get()));
      if (!before && newer.get() != raised.get()) {
        PyException_SetContext(newer.get(), Py_NewRef(raised.get()));
      }
      text = CallMethod(plan.hooks, "on_error", newer, row.ptr());
    }
  }
  const char* utf8 = text ? PyUnicode_AsUTF8(text.get()) : nullptr;
  return utf8 != nullptr ? utf8 : TextWithoutHelp(plan, raised);
}

void WarnOfLoneFailure(const Plan& plan, int ordinal, const std::string& error) {
  Ref device = Ref::Steal(PyLong_FromLong(ordinal));
  Ref text = Ref::Steal(PyUnicode_DecodeUTF8(
      error.data(), static_cast<Py_ssize_t>(error.size()), "replace"));
  if (!CallMethod(plan.hooks, "on_lone_failure", device, text)) {
    PyErr_WriteUnraisable(plan.hooks.get());
  }
}

}  // namespace hostcall
