// XLA's handlers as Python registers them, and what CUDA has to tell.
#pragma once

#include <nanobind/nanobind.h>

namespace hostcall {

/// Adds `handlers`, `cuda_missing`, `pinned_pools`, `limit_pinned` to the module.
void InitHandlers(nanobind::module_& m);

}  // namespace hostcall
