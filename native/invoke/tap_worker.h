// Taps into the queue, and out of it into Python.
#pragma once

#include <cstdint>

#include "plan/plan.h"

namespace hostcall {

/// Queues a tap of these operands. Needs no GIL. False: it was dropped. With
/// `at_once` it never waits: what would is let in.
bool PushTap(const Plan& plan, int device, int64_t run, const void* const* operands,
             bool at_once = false);

/// Delivers until the queue is stopped and empty. Called on the worker's thread,
/// with the GIL, which it gives up between batches and while it waits.
void RunTapWorker();

/// True on the thread that delivers.
bool OnTapWorker();

}  // namespace hostcall
