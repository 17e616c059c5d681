// What XLA keeps for one place of a program: the plan that it calls by, found by
// the number in the program's text.
//
// Lifetime. A plan is held by the Python object that the executable keeps alive, by
// the slot table for as long as that object lives, and by the state of every place
// that was instantiated, which XLA destroys with its executable. A run uses the
// last of these: if one thread drops the executable while another runs it, XLA
// destroys the state after the run, whatever Python has released by then.
#pragma once

#include <cstdint>
#include <memory>

#include "base/slot_table.h"
#include "base/team.h"
#include "plan/plan.h"
#include "plan/throttle.h"
#include "xla/ffi/api/c_api.h"

namespace hostcall {

/// The plans by their numbers. Programs that span several processes have a table of
/// their own (`across`), so that each process gives the same numbers whatever other
/// programs it has. Numbers of that table are never given twice: JAX may share such
/// executables between processes by their text (`jax_share_binary_between_hosts`).
SlotTable<Plan>& Slots(bool across);
/// Added to the numbers of that table in a program's text.
constexpr uint64_t kAcross = uint64_t{1} << 32;

struct PlanState {
  Counted<Plan> plan;
  std::unique_ptr<Team> team;          ///< null: each device calls alone
  std::shared_ptr<Throttle> throttle;  ///< null: every tap goes through
};

/// The ids that XLA gave the type of these states: one in its CPU runtime, one in a
/// CUDA plugin, which has a registry of its own.
XLA_FFI_TypeId* PlanTypeId();
XLA_FFI_TypeId* CudaPlanTypeId();
const XLA_FFI_TypeInfo* PlanTypeInfo();

/// The state that was made when the place was instantiated, in the registry of this
/// type.
XLA_FFI_Error* StateOf(XLA_FFI_CallFrame* frame, const PlanState** state,
                       XLA_FFI_TypeId* type = PlanTypeId());

/// The handlers that XLA calls once for each place of a program, when it compiles
/// or loads it.
XLA_FFI_Error* InstantiateCall(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* InstantiateOnCuda(XLA_FFI_CallFrame* frame);
/// For a place that XLA may record into a command buffer.
XLA_FFI_Error* InstantiateInGraph(XLA_FFI_CallFrame* frame);

}  // namespace hostcall
