// The flight recorder and events for traces.
#pragma once

#include <nanobind/nanobind.h>

namespace hostcall {

void InitTraces(nanobind::module_& m);

}  // namespace hostcall
