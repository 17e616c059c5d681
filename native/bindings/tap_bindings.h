// Taps and their queue, as Python sees them.
#pragma once

#include <nanobind/nanobind.h>

namespace hostcall {

void InitTaps(nanobind::module_& m);

}  // namespace hostcall
