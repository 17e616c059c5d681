// The calls under way, and what surrounds them, as Python sees it.
#pragma once

#include <nanobind/nanobind.h>

namespace hostcall {

void InitCalls(nanobind::module_& m);

}  // namespace hostcall
