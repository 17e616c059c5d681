// Taps, as XLA's CPU runtime makes them.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace hostcall {

XLA_FFI_Error* ExecuteTap(XLA_FFI_CallFrame* frame);
/// Returns the number it is given: a place in the order of effects, as a value.
XLA_FFI_Error* ExecuteLink(XLA_FFI_CallFrame* frame);

}  // namespace hostcall
