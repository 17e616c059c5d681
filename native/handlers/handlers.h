// The handlers that XLA runs for each place of a program, in tables that Python
// registers.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace hostcall {

/// The handlers of one kind of place.
struct Stages {
  const char* name;
  XLA_FFI_Handler* instantiate;  ///< when a program is compiled or loaded; or null
  XLA_FFI_Handler* execute;      ///< at each execution
};
constexpr int kKinds = 6;

/// For XLA's CPU runtime:
///
///   call     makes a call of a function on the host
///   tap      queues a tap (invoke/taps.h)
///   link     copies its operand, a number, to its result. It turns the order of
///            effects into a data dependency (_primitives/blocks.py)
///   verdict  fails the program if a call failed in any process (plan/outcome.h).
///   It
///            runs behind the reduction that brings the call's results to all
///            processes. Its operands are the call's outcome and results, and its
///            own results share the memory of the call's
///   buffer, graph  as call, which Buffers need nothing else for
extern const Stages kCpuHandlers[kKinds];

/// For XLA's CUDA runtime. Plans, slots and states are the same as on the CPU. But
/// operands and results lie in a GPU's memory, which only work on XLA's stream may
/// read and write:
///
///   call     its values go through pinned memory, with one wait for the device
///            (cuda/staging.h)
///   tap      neither the device nor the thread that dispatches waits for it
///   link, verdict  as on the CPU
///   buffer   a call of a function that works on the GPU's memory itself: nothing
///   is
///            copied, and nobody waits for the device
///   graph    the same, but XLA may record it into a command buffer. The function
///            then runs once, and the work that it has put on the stream is
///            repeated with each run
extern const Stages kCudaHandlers[kKinds];

}  // namespace hostcall
