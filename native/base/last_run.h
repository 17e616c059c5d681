// What a thread knows of the program that it has just dispatched: whether one of
// the program's calls ran on this very thread.
//
// If XLA's CPU client runs a program on the dispatching thread, it returns from the
// dispatch after the program has ended (ExecuteHelper in
// xla/pjrt/cpu/cpu_client.cc: `execute_inline`). So a call that ran there says that
// nothing has to be waited for, and costs a write. Asking the program's result
// takes jaxlib 0.15 us.
//
// Who changes what. A handler forgets what its thread ran before when it begins,
// and notes its plan when it ends. Whoever looks after the dispatch takes the note
// (bindings/dispatch_bindings.cc). All of it is one thread's.
//
// Dispatches in Python look always (_jax/dispatch.py). On JAX's fast dispatch a
// note may be left over, if the dispatch raises before anybody looks. The next look
// would take it for its own if that program has the same plan, and XLA has put it
// behind something. This can't happen, since whatever raises after a call is
// counted, or does not exist in the programs for which notes are compared:
//
//   * A call fails: counted below, before its program ends. Who looks and finds
//     another count asks the result.
//   * Another library's custom call fails: programs with one have no plans to
//     compare (_jax/signs.py).
//   * A class of the user's fails to take the results: neither have programs whose
//     results are put into one.
//   * XLA fails between: of its operations on one CPU device only custom calls fail
//     after the program has begun. Memory is taken before.
#pragma once

#include <atomic>
#include <cstdint>
#include <utility>

#include "base/no_copy.h"

namespace hostcall {

/// How many calls have failed. Written before the failed program ends, on any
/// thread.
inline std::atomic<uint64_t> g_failures{0};

/// The plan of the call that this thread has run last; null if somebody looked
/// since, or a call is under way.
inline thread_local const void* t_last_run = nullptr;

/// Takes the calling thread's note.
inline const void* TakeLastRun() { return std::exchange(t_last_run, nullptr); }

/// Notes a call while it lives. A handler that returns an error counts it itself.
struct RunHere : NoCopy {
  explicit RunHere(const void* plan) : plan_(plan) { t_last_run = nullptr; }
  ~RunHere() { t_last_run = plan_; }

 private:
  const void* const plan_;
};

}  // namespace hostcall
