// Layer F. What XLA's CPU runtime calls.
#pragma once

#include "plan.h"
#include "xla/ffi/api/c_api.h"

namespace hostcall {

SlotTable<Plan>& Slots();

/// Made once for each place of a program: finds the plan by its number.
XLA_FFI_Error* InstantiateCall(XLA_FFI_CallFrame* frame);
/// Made once for each execution of that place.
XLA_FFI_Error* ExecuteCall(XLA_FFI_CallFrame* frame);
/// The floor that benchmarks compare with: enters Python, and nothing else.
XLA_FFI_Error* ExecuteRaw(XLA_FFI_CallFrame* frame);
void SetRawFunction(PyObject* function);

XLA_FFI_TypeId* PlanTypeId();
const XLA_FFI_TypeInfo* PlanTypeInfo();

}  // namespace hostcall
