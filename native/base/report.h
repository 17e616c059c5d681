// The type of what JAX raises for a failed call.
//
// XLA carries text, and JAX makes an exception of it: JaxRuntimeError, but
// ValueError where its C++ fast path ran the program on the calling thread. Nothing
// of ours runs between the status and the user's `except`. What CPython runs there
// is the thread's trace function, with the exception, before it looks for a
// handler; an error that it raises takes the exception's place. So a call that
// failed on a thread of Python's sets a trace function, which goes with the first
// event that it sees.
//
// Hazards
//   * Somebody else's trace function (a debugger, coverage): ours is not set, and
//   the
//     exception stays what JAX made of it.
//   * The failure does not come out here (another thread fetches the result): the
//   next
//     event of this thread is another one, and the function goes without a trace.
//   * An exception of somebody else comes first: it lacks our number, and stays.
#pragma once

#include "base/guards.h"

namespace hostcall {

/// `convert(exception)` gives what shall be raised in its place, or None. The GIL
/// is held.
void SetReportConverter(PyObject* convert);

/// Watches the calling thread's next event. The GIL is held.
void WatchForReport();

}  // namespace hostcall
