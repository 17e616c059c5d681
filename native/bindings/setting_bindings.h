// Binds the parts of a plan that are settings: enums and small structs.
#pragma once

#include <nanobind/nanobind.h>

namespace hostcall {

void InitSettings(nanobind::module_& m);

}  // namespace hostcall
