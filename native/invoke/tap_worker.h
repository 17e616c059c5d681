// Delivers the taps of the queue to their Python functions.
#pragma once

#include <cstdint>

#include "plan/plan.h"

namespace hostcall {

/// Delivers taps until the queue is stopped and empty. Called on the worker's
/// thread with the GIL held. Releases the GIL while it waits, and for a moment each
/// time that deliveries have taken long.
void RunTapWorker();

/// Queues a tap as PushTap does. If the queue is stopped, there is no worker (any
/// more), and the calling thread delivers what is queued. The GIL need not be held.
bool PushOrDeliver(const Plan& plan, int device, int64_t run,
                   const void* const* operands, bool at_once = false);

}  // namespace hostcall
