// What a compiled program knows about one of its calls. Python makes a Plan when
// the program is lowered; from then on it changes only in the members marked
// `mutable`.
//
// Threads. Handlers read a plan on any thread, without the GIL, but they touch its
// Python objects only with the GIL held. The one exception is Leaf::fill, whose
// bytes never change. A plan is destroyed with the GIL held (base/slot_table.h).
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/event.h"
#include "base/free_threads.h"
#include "base/guards.h"
#include "base/numpy_api.h"
#include "base/slot_table.h"
#include "base/team.h"
#include "plan/kind.h"
#include "plan/outcome.h"
#include "plan/run_counts.h"
#include "queue/tap_lane.h"

namespace hostcall {

/// One operand or result, as one row of the batch sees it.
struct Leaf {
  Ref dtype;                   ///< the PyArray_Descr of the elements on the host
  std::vector<npy_intp> dims;  ///< shape of one row
  int bits = 0;            ///< 1, 2 or 4 if XLA packs elements into bytes; else 0
  bool is_signed = false;  ///< whether packed elements are signed
  std::vector<bool> batched;  ///< for each batch axis, whether the buffer has it
  Ref convert;  ///< makes the function's argument from the array; null: the array
  Ref fill;     ///< the bytes of a result's masked row; null: zeros

  // Derived by Plan.
  int64_t count = 1;      ///< elements in one row
  int64_t row_bytes = 0;  ///< bytes of one row on the host
  int64_t rows = 1;       ///< rows in the buffer
  /// For each batch axis, how many rows of the buffer one step along it takes; 0 if
  /// the buffer lacks the axis.
  std::vector<int64_t> grid_strides;

  /// Bytes of the whole buffer in XLA's layout.
  size_t buffer_bytes() const {
    const int64_t elements = count * rows;
    return static_cast<size_t>(bits == 0 ? row_bytes * rows
                                         : (elements * bits + 7) / 8);
  }
  /// The bytes that XLA passes for it. An element of float0 has none on the host,
  /// and is a bool there.
  size_t xlas_bytes() const {
    return bits == 0 && row_bytes == 0 ? static_cast<size_t>(count * rows)
                                       : buffer_bytes();
  }
  PyArray_Descr* descr() const {
    return reinterpret_cast<PyArray_Descr*>(dtype.get());
  }
};

/// How the function's return value is taken apart into result leaves.
enum class ResultForm {
  kLeaf,     ///< the value is the one leaf
  kTuple,    ///< a tuple of leaves
  kNothing,  ///< None
  kTree,     ///< any other tree: Plan::flatten takes it apart
  kIgnored,  ///< a tap's return value, which nobody reads
};

/// Which calls of a plan run inside one of XLA's host callbacks
/// (handlers/host_callback.h says why that avoids deadlocks).
enum class Inside {
  kNever,        ///< none
  kAsked,        ///< calls on XLA's threads, once the plan's guard has asked for it
  kXlasThreads,  ///< calls on XLA's threads
  kEverywhere,   ///< all
};

/// What the calls of one function have cost, in all its programs. Attached threads
/// write to the part of their group; devices write the atomic members.
struct Counters {
  struct Part {
    Tally calls;         ///< rows for which the Python function was called
    Tally errors;        ///< calls that failed
    Tally bytes_in;      ///< bytes handed to the function
    Tally bytes_out;     ///< bytes taken from its return values
    Tally python_ticks;  ///< time in the function and in conversions (clock.h)
    Tally gil_ticks;     ///< time from a call's start until it is attached
    char rest_of_two_lines[128 - 6 * sizeof(Tally)];
  };
  Part& mine() { return parts[Group()]; }
  /// A count of all parts.
  int64_t Sum(Tally Part::* count) const {
    int64_t sum = 0;
    for (const Part& part : parts) sum += (part.*count).value();
    return sum;
  }
  std::array<Part, kGroups> parts;
  // Relaxed, as those of taps are.
  std::atomic<int64_t> masked{0};  ///< rows that `where` kept from the function
  std::atomic<int64_t> native_calls{0};  ///< rows for which native code was called
  TapCounts taps;  ///< taps that were masked, skipped, dropped
};

/// What Python gives of a plan (bindings/plan_bindings.cc). Signatures of the
/// functions among its objects are written (arguments) -> result.
struct PlanFields {
  Ref function;  ///< one argument for each leaf -> the value
  std::vector<Leaf> args;
  std::vector<Leaf> results;
  std::vector<int64_t> grid;  ///< sizes of the batch axes, outermost first
  /// Which of them the mask has, the first operand; null: there is none.
  std::optional<std::vector<bool>> mask;
  ResultForm form = ResultForm::kTree;
  /// What the plan's kind is copied from (Kind::For). Python's object, which only
  /// the constructor of the plan uses; null afterwards.
  const Kind* prototype = nullptr;
  Ref runner;  ///< (rows, indices) -> list of values, for all rows at once; or null
  Ref out_tree;  ///< (list of result arrays) -> the `out` argument; or null
  Ref hooks;     ///< Python's CallHooks, which answer questions about the call
  /// (text of a block) -> the plan of the device that has it; null if the devices
  /// share this plan.
  Ref plan_of_block;
  Ref device;          ///< the device that host code finds as its default
  Ref enter;           ///< () -> the former values: sets JAX's settings of the
                       ///< trace; null if those were the process's own
  Ref leave;           ///< (the former values): sets them; null if `enter` is
  Ref counters_owner;  ///< the Python object that `counters` points into
  Counters* counters = nullptr;  ///< alive as long as `counters_owner`
  uint32_t place = 0;            ///< the number of the call's place (base/places.h)
  /// One more result, the outcome, tells all processes whether the call failed.
  bool returns_outcome = false;
  /// Another process makes the call. Here `function` takes no arguments, and only
  /// raises if the program may not go on.
  bool called_by_other_process = false;
  bool sends = false;  ///< whether the runner sends rows to other processes
  std::optional<TeamSettings> team;  ///< null: each device calls alone
  /// Examines the programs that host code starts: with a team, refuses those that
  /// would wait for this one; with kAsked, asks where a call scouts. Else null.
  Ref guard;
  Inside inside = Inside::kNever;
  bool keeps_mesh = false;  ///< host code sees the dispatching thread's meshes
  bool literals = true;  ///< stores Python's numbers as scalars; else `coerce` does
  bool counted = false;  ///< whether executions are counted, masked ones too
  std::string text;      ///< describes a call of registered host code; else empty
};

/// A plan owns its Python objects.
class Plan : public TapOwner, public PlanFields {
 public:
  /// Derives what follows from the fields. Throws std::invalid_argument if they
  /// contradict each other. The GIL is held.
  explicit Plan(PlanFields fields);

  // `hooks` are asked for these once, as looking up a method takes longer than a
  // small call. For what happens only after a failure it is asked then.
  Ref flatten;  ///< (value) -> list of leaves; raises for a wrong structure
  Ref coerce;   ///< (leaf number, value) -> array of the leaf's dtype and shape
  std::unique_ptr<const Kind> kind;  ///< never null
  /// For each argument, an array of an earlier call that nobody kept; or what the
  /// kind keeps in its place (Kind::SpareCount).
  std::unique_ptr<Spare[]> spares;
  int64_t rows = 1;                     ///< product of grid
  bool masked = false;                  ///< whether the first operand is the mask
  std::vector<int64_t> mask_strides;    ///< the mask's Leaf::grid_strides
  int64_t mask_rows = 1;                ///< bools in the mask's buffer
  bool packed = false;                  ///< whether XLA packs some leaf's elements
  int64_t bytes_in = 0, bytes_out = 0;  ///< host bytes of one row
  std::unique_ptr<DeviceRunCounts> executions;  ///< null unless `counted`
  /// Whether a call has asked. Relaxed: a call that misses it asks again.
  mutable std::atomic<bool> asked{false};
  mutable Failures
      failures;  ///< errors of recent runs; used only if `returns_outcome`

  /// Bytes of each operand of the custom call: of the mask, if there is one, of the
  /// arguments, and of what the kind has behind them.
  std::vector<size_t> operand_bytes;
  /// Bytes of each result of the custom call: of the leaves, of the outcome, if
  /// there is one, and of what the kind has behind them.
  std::vector<size_t> result_bytes;

  /// Operands that are the mask or an argument.
  size_t operands() const { return args.size() + (masked ? 1 : 0); }

  /// Bytes of a leaf's buffer: those that the engine copies, or those of XLA's.
  using Bytes = size_t (Leaf::*)() const;
  /// Bytes of the mask, if there is one, and of each argument.
  std::vector<size_t> MaskAndArgumentBytes(
      Bytes bytes = &Leaf::buffer_bytes) const {
    std::vector<size_t> sizes;
    if (masked) sizes.push_back(static_cast<size_t>(mask_rows));
    for (const Leaf& leaf : args) sizes.push_back((leaf.*bytes)());
    return sizes;
  }
  /// `operand_bytes`, and `result_bytes`, by another count of a leaf's bytes.
  std::vector<size_t> OperandBytes(Bytes bytes) const;
  std::vector<size_t> ResultBytes(Bytes bytes) const;

  /// Whether `where` keeps all rows of these operands from the function.
  bool KeepsBack(const void* const* operands) const {
    if (!masked) return false;
    const bool* mask = static_cast<const bool*>(operands[0]);
    return std::find(mask, mask + mask_rows, true) == mask + mask_rows;
  }

  /// An event of this plan that begins at `start`.
  Event NewEvent(EventKind event_kind, int device, int64_t run,
                 int64_t start) const {
    Event event;
    event.kind = event_kind;
    event.device = static_cast<int16_t>(device);
    event.place = place;
    event.start = start;
    event.bytes = rows * (bytes_in + bytes_out);
    event.run = run;
    return event;
  }
};

/// Python's reference to a plan.
struct PlanHandle {
  RefPtr<Plan> plan;
  /// Python destroys it, with the GIL: an eager call is the only use of its plan.
  ~PlanHandle() { plan.DropHere(); }
};

}  // namespace hostcall
