// XLA's handlers as Python registers them, host callbacks, and the CUDA side.
#pragma once

#include <nanobind/nanobind.h>

namespace hostcall {

void InitHandlers(nanobind::module_& m);

}  // namespace hostcall
