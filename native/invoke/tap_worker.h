// Taps out of the queue, into Python.
#pragma once

namespace hostcall {

/// Delivers until the queue is stopped and empty. Called on the worker's thread,
/// with the GIL, which it gives up between batches and while it waits.
void RunTapWorker();

}  // namespace hostcall
