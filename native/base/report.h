// Replaces the ValueError that JAX's fast path raises for a failed call.
//
// XLA carries only text, of which JAX makes an exception: a ValueError if the
// program was still being dispatched by JAX's C++, else a JaxRuntimeError, whose
// constructor is Python's and is watched (_core/failures.py). No code of hostcall
// runs between XLA's status and the user's `except`. But CPython shows each
// exception to whoever monitors RAISE before it looks for a handler, and an error
// raised there takes its place.
//
// The thread that raises is not always the one on which the call failed: threads of
// XLA's may run a program's calls while the one that dispatches it waits. So all
// threads are watched: from the first failure on, by sys.monitoring, at some 0.1 us
// for each exception that is raised.
//
// Python 3.11 has no sys.monitoring. There a call that fails on one of Python's
// threads sets a trace function on it, which removes itself at the first event that
// it sees. One on another thread would hang it: 3.11 repeats the first instruction
// of a traced function for as long as an asynchronous exception waits for any
// thread.
//
// Hazards
//   * Both free tools of sys.monitoring are taken, or (3.11) a debugger or coverage
//     has set a trace function, or (3.11) a thread of XLA's made the call: the
//     exception stays what JAX made of it.
//   * Another exception comes first. It stays: only a ValueError with a number of
//     ours is replaced, and only if nobody has been told of that failure.
#pragma once

#include "base/guards.h"

namespace hostcall {

/// The first failure has been kept. Does nothing on Python 3.11. The GIL is held.
void MonitorRaises();

/// What the calling thread does has failed. `returns` says whether it returns to
/// Python code. Does nothing on Python 3.12 and later. The GIL is held.
void WatchForReport(bool returns);

}  // namespace hostcall
