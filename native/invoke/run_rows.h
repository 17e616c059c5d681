// Runs a function on all rows of a batch: one after another, or all at once by a
// runner of Python's.
//
// A kind says what is done for one row by a callable, run_row(args, targets), with
// the addresses of the row's arguments and results; false with a Python error set.
// It is a template, so that a call of one row has no call more than its own.
#pragma once

#include "invoke/invoke.h"
#include "plan/call_scope.h"
#include "plan/kind.h"
#include "plan/plan.h"
#include "plan/rows.h"

namespace hostcall {

/// What a row that fails does to the call.
enum class FailedRow {
  kEndsCall,
  kIsReported,  ///< and the rows after it run: no program fails
};

/// Hands all rows to the plan's runner at once. False with a Python error set.
bool RunTogether(const Plan& plan, Rows& rows);

/// Runs one row, and counts it.
template <typename RunRow>
bool RunCounted(const Plan& plan, const RunRow& run_row, char* const* args,
                char* const* targets) {
  Counters::Part& counters = plan.counters->mine();
  counters.calls.Add(1);
  counters.bytes_in.Add(plan.bytes_in);
  if (!run_row(args, targets)) return false;
  counters.bytes_out.Add(plan.bytes_out);
  return true;
}

/// Runs one row after another. False with a Python error set.
template <typename RunRow>
bool RunInOrder(const Plan& plan, ActiveCall& call, Rows& rows,
                FailedRow failed_row, const RunRow& run_row) {
  const RowMark mark(call, &rows.index());
  bool ok = true;
  do {
    if (!rows.is_wanted()) {
      rows.Fill();
    } else if (!RunCounted(plan, run_row, rows.args(), rows.targets())) {
      ok = failed_row == FailedRow::kIsReported &&
           !PyErr_ExceptionMatches(PyExc_KeyboardInterrupt);
      if (ok) {
        call.FailedAt(rows.index());
        TakeError(plan, call);
      }
    } else if (PyErr_CheckSignals() != 0) {  // Ctrl-C during this row
      ok = false;
    }
  } while (ok && rows.Next());
  if (!ok) call.FailedAt(rows.index());
  return ok;
}

/// Runs all rows of an execution. The GIL is held. False with a Python error set.
template <typename RunRow>
bool RunRows(const Execution& execution, ActiveCall& call, FailedRow failed_row,
             const RunRow& run_row) {
  const Plan& plan = execution.plan;
  // The common case: one row, nothing packed, nothing masked.
  if (plan.grid.empty() && !plan.packed && !plan.runner) {
    // The const_cast is safe: of the arrays that the function gets, only lent ones
    // lie in the operands, and those are read-only.
    auto* args = const_cast<char* const*>(
        reinterpret_cast<const char* const*>(execution.operands) +
        (plan.masked ? 1 : 0));
    auto* targets = reinterpret_cast<char* const*>(execution.results);
    return RunCounted(plan, run_row, args, targets);
  }
  Rows rows(plan, execution.operands, execution.results, call.on_gpu());
  const bool ok = plan.runner ? RunTogether(plan, rows)
                              : RunInOrder(plan, call, rows, failed_row, run_row);
  if (ok) rows.Finish();
  return ok;
}

}  // namespace hostcall
