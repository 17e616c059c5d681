// The parts of the engine that are bound to Python, and what they share.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <vector>

namespace hostcall {

/// The calls under way, and JAX's settings around them.
void InitCalls(nanobind::module_& m);
/// What JAX calls after a dispatch.
void InitDispatches(nanobind::module_& m);
/// The rings of feeds.
void InitFeeds(nanobind::module_& m);
/// The handlers that XLA calls, and what they use of GPUs and host callbacks.
void InitHandlers(nanobind::module_& m);
/// The kinds of equations.
void InitKinds(nanobind::module_& m);
/// Plans with their settings, the slots that hold them, and runs without a program.
void InitPlans(nanobind::module_& m);
/// Taps and their queue.
void InitTaps(nanobind::module_& m);
/// The flight recorder, and events for traces.
void InitFlight(nanobind::module_& m);

/// The addresses of the memory of NumPy's arrays, which the list keeps alive.
/// Throws if they are not row-major, or have other bytes than these, `times` over.
std::vector<const void*> DataOf(nanobind::list arrays,
                                const std::vector<size_t>& sizes, size_t times = 1);

}  // namespace hostcall
