// The state that XLA keeps for each place of a program: above all the plan, which
// is found by its name in the program's text.
//
// Lifetime. Three owners hold a plan: the Python object that the executable keeps
// alive, the slot table for as long as that object lives, and the state of every
// place that was instantiated, which XLA destroys with its executable. A run uses
// only the state:
//
//   1. thread A: runs the executable; its handler reads the state
//   2. thread B: drops the executable; Python releases its references to the plan
//   3. thread A: goes on using the plan through the state
//   4. XLA:      destroys the executable, and the state with it, after the run
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/no_copy.h"
#include "base/slot_table.h"
#include "base/team.h"
#include "handlers/ffi.h"
#include "plan/plan.h"
#include "plan/throttle.h"
#include "xla/ffi/api/c_api.h"

namespace hostcall {

/// The plans by their names. Programs that span several processes have a table of
/// their own (`across`), so that all processes count alike, whatever other programs
/// they have. A name of that table that was used is not given again: JAX may share
/// such executables between processes by their text
/// (`jax_share_binary_between_hosts`).
SlotTable<Plan>& Slots(bool across);
/// In a program's text, added to the counts of the `across` table.
constexpr uint64_t kAcross = uint64_t{1} << 32;

/// A buffer that XLA passes: its dtype as XLA_FFI_DataType, then its dimensions.
using BufferType = std::vector<int64_t>;
/// Asks Python for plans. The bindings set it once: they know Python's class of
/// plans, and the handlers need no nanobind. The GIL is held. Throws what Python
/// raises.
struct PlanMakers {
  /// The plan of a device's block of a call: from the plan of the whole call, and a
  /// text that says which block it is (_primitives/blocks.py).
  RefPtr<Plan> (*of_block)(const Plan& whole, std::string_view block);
  /// Reads the text that describes a call of registered host code
  /// (_export/texts.py). Without `buffers`, when the program is loaded, it
  /// only checks the text, and returns null. With them, the operands and results of
  /// a run, it makes the plan, if they are what the text says.
  RefPtr<Plan> (*of_text)(std::string_view text, bool on_cuda,
                          const std::vector<BufferType>* buffers);
};
extern PlanMakers g_plan_makers;

/// Read by all threads that execute the place; only `made` and `fits` change after
/// it was made.
///
/// A place whose call is described by a text has no plan here. Its first run makes
/// the plan, for two reasons: shapes that were symbolic are known then, and a text
/// from a file is not trusted, so its shapes are compared with XLA's buffers once.
/// All devices of a program may come at the same time. Each makes a plan, with no
/// lock; the first to publish its state wins, and the others drop theirs.
struct PlanState : NoCopy {
  ~PlanState();
  RefPtr<Plan> plan;                   ///< null: `made` has it
  std::unique_ptr<Team> team;          ///< null: each device calls alone
  std::shared_ptr<Throttle> throttle;  ///< null: every tap goes through
  // Both are used only without a plan.
  std::string text;
  bool on_cuda = false;  ///< whether the place was compiled for CUDA
  /// The state with the plan of the text; null before the first run. Owned.
  /// Published with release and read with acquire: whoever finds the state sees all
  /// of it.
  mutable std::atomic<const PlanState*> made{nullptr};
  /// Whether the plan's kind and XLA's buffers were found to be right. Once is
  /// enough: a place has one handler, and the sizes of its buffers are part of the
  /// compiled program.
  mutable std::atomic<bool> fits{false};
};

/// The ids of PlanState in XLA's registries of types. XLA's CPU runtime has one
/// registry, a CUDA plugin another. XLA writes them when Python registers the
/// types.
inline XLA_FFI_TypeId g_plan_type = XLA_FFI_UNKNOWN_TYPE_ID;
inline XLA_FFI_TypeId g_cuda_plan_type = XLA_FFI_UNKNOWN_TYPE_ID;
const XLA_FFI_TypeInfo* PlanTypeInfo();

/// Finds the state that was made when the place was instantiated. `type` is its id
/// in the registry of the runtime that runs the handler. Throws XlaError.
const PlanState& FindState(XLA_FFI_CallFrame* frame,
                           XLA_FFI_TypeId* type = &g_plan_type);

/// What a handler starts from that passes XLA's buffers to a plan. Lives on its
/// stack.
struct Work {
  /// Throws if `accepts` refuses the plan's kind, or XLA's buffers have other sizes
  /// than the plan's.
  Work(XLA_FFI_CallFrame* frame, bool (*accepts)(const Kind&),
       XLA_FFI_TypeId* type = &g_plan_type);

  XLA_FFI_CallFrame* const frame;
  const PlanState& state;
  const Plan& plan;
  Pointers operands;  ///< the mask first, a tap's flag `always` last
  Pointers results;   ///< the outcome last
};

/// Finds the plan of a place, and gives XLA a state of this type for it.
XLA_FFI_Error* Instantiate(XLA_FFI_CallFrame* frame, XLA_FFI_TypeId* type);

/// The handler that XLA calls once for each place of a program, when it compiles or
/// loads it.
template <XLA_FFI_TypeId* kType, uint32_t kTraits = 0>
XLA_FFI_Error* HandleInstantiate(XLA_FFI_CallFrame* frame) {
  const auto body = [](XLA_FFI_CallFrame* f) { return Instantiate(f, kType); };
  return Guarded(frame, body, *kType, kTraits);
}

}  // namespace hostcall
