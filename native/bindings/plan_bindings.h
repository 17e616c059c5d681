// Binds plans to Python, which makes them and may run them without a program.
#pragma once

#include <nanobind/nanobind.h>

namespace hostcall {

void InitPlans(nanobind::module_& m);

}  // namespace hostcall
