// Binds the calls under way, and JAX's settings around them, to Python.
#pragma once

#include <nanobind/nanobind.h>

namespace hostcall {

void InitCalls(nanobind::module_& m);

}  // namespace hostcall
