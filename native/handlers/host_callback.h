// Calls inside of what XLA's CPU runtime takes for one of its host
// callbacks.
//
// On a thread that is inside a host callback the runtime runs every program where
// it is dispatched, whichever client it is for: it waits for none of the client's
// threads, nor (where XLA is new enough) for one of the 32 places of a device.
// Without that, a callback that computes on the client that waits for it may wait
// for itself.
//
// XLA keeps it as a depth for each thread, and exports nothing that changes it.
// JAX's handler of buffer callbacks does, around a Python function that it takes
// from the host callbacks of the running program. So a call goes through that
// handler:
//
//   Run ── frame, without buffers ──> JAX's handler: depth + 1 ──> RunPending: the
//   call
//                                                    depth - 1 <──
//
// Hazards. The frame is copied from that of the running handler, with zeros
// behind it, so a newer XLA finds all it knows. The program may have no host
// callbacks; the frame's interface is therefore a copy that answers that one
// question (ExecutionContext_Get, now InvokeContext_Get) itself: with a block of
// words that all point to a block of words that all point to `RunPending`, whatever
// the answer's layout. A handler that does not like the frame returns an error, and
// the call runs as without it.
#pragma once

#include <functional>

#include "base/guards.h"
#include "handlers/ffi.h"

namespace hostcall {

/// JAX's handler, and the Python function that calls RunPending.
void SetHostCallbackHandler(PyObject* handler, PyObject* run_pending);

/// Makes the call that the calling thread has ready.
void RunPending();

/// Whether a call of this thread runs inside a host callback.
bool InsideHostCallback();

/// How far the scout of the calling thread's call (plan.h) is.
enum class Scout {
  kNone,   ///< none looks: what is left on a thread of XLA's is not asked
  kLooks,  ///< at the call under way
  kAsked,  ///< that the call be made inside
};
Scout& ScoutNow();

/// The scout asks that the call be made inside. False: none looks.
bool AskInside();

/// Calls `body` once, inside a host callback if it can be. `frame` is that of the
/// handler that makes the call. The GIL is held.
void RunInsideHostCallback(const XLA_FFI_CallFrame* frame,
                           const std::function<void()>& body);

}  // namespace hostcall
