// Binds taps and their queue to Python.
#pragma once

#include <nanobind/nanobind.h>

namespace hostcall {

void InitTaps(nanobind::module_& m);

}  // namespace hostcall
