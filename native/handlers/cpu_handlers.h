// What XLA's CPU runtime calls.
#pragma once

#include <memory>

#include "plan/plan.h"
#include "plan/throttle.h"
#include "xla/ffi/api/c_api.h"

namespace hostcall {

/// The numbers of calls. Those of programs over several processes have a table of
/// their own, so that each process gives the same ones whatever programs it alone
/// has, and a lasting one: JAX may keep such executables by their text
/// (`jax_share_binary_between_hosts`).
SlotTable<Plan>& Slots(bool across);
constexpr uint64_t kAcross = uint64_t{1} << 32;  ///< in the text, of the latter

/// What XLA keeps for one place of a program.
struct PlanState {
  Counted<Plan> plan;
  std::shared_ptr<Team> team;          ///< null: the program runs on one device
  std::shared_ptr<Throttle> throttle;  ///< null: every tap goes through
};
XLA_FFI_TypeId* PlanTypeId();
XLA_FFI_TypeId* CudaPlanTypeId();
const XLA_FFI_TypeInfo* PlanTypeInfo();

/// What was kept when the place was instantiated, in the registry of this type.
XLA_FFI_Error* StateOf(XLA_FFI_CallFrame* frame, const PlanState** state,
                       XLA_FFI_TypeId* type = PlanTypeId());

/// Made once for each place of a program: finds the plan by its number.
XLA_FFI_Error* InstantiateCall(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* InstantiateOnCuda(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* InstantiateInGraph(XLA_FFI_CallFrame* frame);
/// Made once for each execution of that place.
XLA_FFI_Error* ExecuteCall(XLA_FFI_CallFrame* frame);
/// The same for a tap (tap_handlers.cc).
XLA_FFI_Error* ExecuteTap(XLA_FFI_CallFrame* frame);
/// What a tap asks before it sends values, on any platform: whether this device is
/// one that taps, whether `where` keeps all of it back (counted), and whether it is
/// one of those that are left out (counted).
bool IsWanted(const PlanState& state, int device);
bool IsMasked(const Plan& plan, const void* const* operands);
bool IsSkipped(const Plan& plan, Throttle* throttle, int device, int64_t run);
/// Gives its number back: a place in the order of effects, as a value.
XLA_FFI_Error* ExecuteLink(XLA_FFI_CallFrame* frame);
/// Behind the reduction that brings all processes a call's results: fails where the
/// call did. The operands are the outcome and the results, whose memory is also its
/// own results'.
XLA_FFI_Error* ExecuteVerdict(XLA_FFI_CallFrame* frame);
/// The floor that benchmarks compare with: enters Python, and nothing else.
XLA_FFI_Error* ExecuteRaw(XLA_FFI_CallFrame* frame);
void SetRawFunction(PyObject* function);

}  // namespace hostcall
