// Makes XLA's CPU runtime treat a call as one of its host callbacks.
//
// On a thread that is inside a host callback, the runtime runs every program on
// that thread, whichever client the program is for. It waits neither for the
// client's threads nor (if XLA is new enough) for one of the 32 places of a device.
// Without that, a callback may deadlock:
//
//   1. XLA's thread: runs a program, whose callback takes the pool's last thread
//   2. callback:     starts a program on the same client, and waits for its result
//   3. that program: waits for a thread of the pool
//
// XLA keeps a depth of host callbacks for each thread, and exports no function that
// changes it. JAX's handler of buffer callbacks changes it, around a Python
// function that it takes from the host callbacks of the running program. So a call
// goes through that handler:
//
//   1. Run:           makes a frame without buffers, and calls JAX's handler
//   2. JAX's handler: adds 1 to the depth, and calls the Python function RunPending
//   3. RunPending:    makes the call
//   4. JAX's handler: subtracts 1 from the depth
//
// Hazards
//   * A newer XLA may read more members of the frame. The frame is a copy of the
//     running handler's, with zeros behind it.
//   * The program may have no host callbacks. So the frame has a copy of the
//     interface, in which the function that gives them (ExecutionContext_Get, now
//     InvokeContext_Get) is ours.
//   * The layout of that function's answer may change. Ours answers with a block of
//     words that all point to a block of words that all point to the Python
//     function, which suits any layout that leads to a list of callbacks. Python
//     gives the handler only in versions of jaxlib for which it was seen to be
//     right (_jax/versions.py); in others every call is made without it.
//   * JAX's handler may refuse the frame with an error. Then the call is made
//     without the handler.
#pragma once

#include <functional>

#include "base/guards.h"
#include "handlers/ffi.h"

namespace hostcall {

/// Sets JAX's handler (an XLA_FFI_Handler) and the Python function
/// that calls RunPending. The GIL is held.
void SetHostCallbackHandler(void* handler, PyObject* run_pending);

/// Makes the call that the calling thread has sent through JAX's handler, if it has
/// not been made. What it throws is kept for RunInsideHostCallback. The GIL is
/// held.
void RunPending();

/// Whether a call of this thread runs inside a host callback.
bool InsideHostCallback();

/// Calls `body` exactly once, inside a host callback if possible. `frame` is that
/// of the handler that makes the call. The GIL is held. Throws what `body` throws.
void RunInsideHostCallback(const XLA_FFI_CallFrame* frame,
                           const std::function<void()>& body);

}  // namespace hostcall
