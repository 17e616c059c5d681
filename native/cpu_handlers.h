// Layer F. What XLA's CPU runtime calls.
#pragma once

#include <memory>

#include "plan.h"
#include "throttle.h"
#include "xla/ffi/api/c_api.h"

namespace hostcall {

SlotTable<Plan>& Slots();

/// What XLA keeps for one place of a program.
struct PlanState {
  Counted<Plan> plan;
  std::shared_ptr<Team> team;          ///< null: the program runs on one device
  std::unique_ptr<Throttle> throttle;  ///< null: every tap goes through
};
XLA_FFI_Error* StateOf(XLA_FFI_CallFrame* frame, const PlanState** state);

/// Made once for each place of a program: finds the plan by its number.
XLA_FFI_Error* InstantiateCall(XLA_FFI_CallFrame* frame);
/// Made once for each execution of that place.
XLA_FFI_Error* ExecuteCall(XLA_FFI_CallFrame* frame);
/// The same for a tap (tap_handlers.cc).
XLA_FFI_Error* ExecuteTap(XLA_FFI_CallFrame* frame);
/// Gives its number back: a place in the order of effects, as a value.
XLA_FFI_Error* ExecuteLink(XLA_FFI_CallFrame* frame);
/// The floor that benchmarks compare with: enters Python, and nothing else.
XLA_FFI_Error* ExecuteRaw(XLA_FFI_CallFrame* frame);
void SetRawFunction(PyObject* function);

XLA_FFI_TypeId* PlanTypeId();
const XLA_FFI_TypeInfo* PlanTypeInfo();

}  // namespace hostcall
