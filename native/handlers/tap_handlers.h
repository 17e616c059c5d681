// The handlers of taps for XLA's CPU runtime.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace hostcall {

/// Queues a tap (plan/push_tap.h).
XLA_FFI_Error* ExecuteTap(XLA_FFI_CallFrame* frame);
/// Copies its operand, a number, to its result. It turns the order of effects into
/// a data dependency (_primitives/blocks.py).
XLA_FFI_Error* ExecuteLink(XLA_FFI_CallFrame* frame);

}  // namespace hostcall
