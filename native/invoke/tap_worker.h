// Delivers the taps of the queue to their Python functions.
#pragma once

namespace hostcall {

/// Delivers taps until the queue is stopped and empty. Called on the worker's
/// thread with the GIL held. Releases the GIL while it waits, and for a moment each
/// time that deliveries have taken long.
void RunTapWorker();

}  // namespace hostcall
