// Replaces the exception that JAX raises for a failed call.
//
// XLA carries only text, of which JAX makes an exception: JaxRuntimeError, or
// ValueError if JAX's C++ fast path ran the program on the calling thread. No code
// of hostcall runs between XLA's status and the user's `except`. But CPython runs
// the thread's trace function there: it calls it with the exception before it looks
// for a handler, and an error that the trace function raises takes the exception's
// place. So a call that fails on one of Python's threads sets a trace function,
// which removes itself at the first event that it sees.
//
// Hazards
//   * Somebody else's trace function (a debugger, coverage) is set: ours is not,
//     and the exception stays what JAX made of it.
//   * The exception is not raised on this thread, since another one fetches the
//     result: our function sees some other event first, and removes itself without
//     effect.
//   * An unrelated exception comes first: its text lacks our error number, so it
//     stays.
#pragma once

#include "base/guards.h"

namespace hostcall {

/// Sets the function that converts exceptions: `convert(exception)` returns the
/// exception to raise in its place, or None to leave it. The GIL is held.
void SetReportConverter(PyObject* convert);

/// Sets the trace function for the calling thread's next event. The GIL is held.
void WatchForReport();

}  // namespace hostcall
