// Plans, as Python makes them and runs them without a program.
#pragma once

#include <nanobind/nanobind.h>

namespace hostcall {

void InitPlans(nanobind::module_& m);

}  // namespace hostcall
