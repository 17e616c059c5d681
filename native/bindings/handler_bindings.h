// Binds the handlers, host callbacks, and the CUDA side of the engine to Python.
#pragma once

#include <nanobind/nanobind.h>

namespace hostcall {

void InitHandlers(nanobind::module_& m);

}  // namespace hostcall
