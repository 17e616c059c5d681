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
#include "base/layout.h"
#include "base/numpy_api.h"
#include "base/slot_table.h"
#include "base/team.h"
#include "plan/outcome.h"
#include "plan/run_counts.h"
#include "queue/feed_ring.h"
#include "queue/tap_queue.h"

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

/// How arguments reach the function.
enum class Lend {
  kCopy,     ///< arrays that the function owns
  kArgs,     ///< read-only views of XLA's memory
  kOut,      ///< as kArgs, and writable views of the results' memory as `out=`
  kBuffers,  ///< Buffers over the results, then over the arguments (buffer_call.h)
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

/// The settings of a call that works in place on buffers.
struct BufferSettings {
  /// For each result, the number of the argument whose memory it shares, or -1.
  std::vector<int> aliases;
  bool debug = false;     ///< poisons outputs, and checks whether inputs changed
  uintptr_t address = 0;  ///< native code to run instead of the function; 0: none
  bool status = false;    ///< whether the native code returns an error number

  bool Aliases(size_t result) const {
    return result < aliases.size() && aliases[result] >= 0;
  }
  /// Whether some result shares this argument's memory.
  bool Shares(size_t arg) const {
    const auto number = static_cast<int>(arg);
    return std::find(aliases.begin(), aliases.end(), number) != aliases.end();
  }
};

/// The settings of a tap: its operands are queued, and the function runs later.
struct TapSettings {
  WhenFull when_full = WhenFull::kBlock;
  bool nested = false;  ///< host code runs its program, so it never waits for space
  /// Ordinals of the devices that tap; empty: all.
  std::vector<int> only;
  bool linked = false;      ///< has one result, a number that says that the tap ran
  bool through = false;     ///< returns its arguments as results
  int64_t every_steps = 0;  ///< one in this many executions goes through; 0: all
  int64_t every_ns = 0;     ///< at most one in this many nanoseconds; 0: no bound
  double sample = 1;        ///< the share of executions that go through
  /// Whether the last operand is the flag `always`: a bool that lets an execution
  /// through which `every` or `sample` would leave out. It is not queued.
  bool always = false;
  /// Up to this many events in one call; 0: each alone, unstacked.
  int64_t batch = 0;
};

/// The settings of a feed: its results are an item of a ring, and a bool that says
/// whether there was one. The function is called only if none is ready: it gets the
/// lane, and returns when there may be one, or raises.
struct FeedSettings {
  std::shared_ptr<FeedRing> ring;  ///< never null
  /// For each lane, the ordinal of its device; empty: all devices use the one lane.
  std::vector<int> devices;

  size_t LaneOf(int device) const {
    const auto found = std::find(devices.begin(), devices.end(), device);
    return found == devices.end() ? 0
                                  : static_cast<size_t>(found - devices.begin());
  }
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
  Lend lend = Lend::kCopy;
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
  std::optional<TapSettings> tap;  ///< null: the plan is a call's
  BufferSettings buffers;          ///< all defaults unless `lend` is kBuffers
  bool counted = false;  ///< whether executions are counted, masked ones too
  std::optional<FeedSettings> feed;  ///< null: not a feed's, or made elsewhere
  std::string text;  ///< describes a call of registered host code; else empty
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
  /// For each argument, an array of an earlier call that nobody kept. With
  /// kBuffers, the context and a Buffer for each result and argument instead.
  std::unique_ptr<Spare[]> spares;
  int64_t rows = 1;                     ///< product of grid
  bool masked = false;                  ///< whether the first operand is the mask
  std::vector<int64_t> mask_strides;    ///< the mask's Leaf::grid_strides
  int64_t mask_rows = 1;                ///< bools in the mask's buffer
  bool packed = false;                  ///< whether XLA packs some leaf's elements
  int64_t bytes_in = 0, bytes_out = 0;  ///< host bytes of one row
  /// Where a tap's operands lie in an event of the queue, the mask first.
  Layout layout;
  std::unique_ptr<DeviceRunCounts> executions;  ///< null unless `counted`
  /// Whether a call has asked. Relaxed: a call that misses it asks again.
  mutable std::atomic<bool> asked{false};
  mutable Failures
      failures;  ///< errors of recent runs; used only if `returns_outcome`

  /// Operands with data that XLA passes: the mask, if any, and the arguments.
  size_t operands() const { return args.size() + (masked ? 1 : 0); }
  /// Operands of the custom call: those, and a tap's flag `always`, if any.
  size_t inputs() const { return operands() + (tap && tap->always ? 1 : 0); }
  /// Results of the custom call: the function's, and the outcome, if any; of a tap
  /// its arguments, or the number that says that it ran.
  size_t outputs() const {
    return (tap && tap->through ? args : results).size() +
           (returns_outcome || (tap && tap->linked) ? 1 : 0);
  }

  /// Bytes of a leaf's buffer: those that the engine copies, or those of XLA's.
  using Bytes = size_t (Leaf::*)() const;
  /// The bytes of those operands, and of those results.
  std::vector<size_t> InputSizes(Bytes bytes = &Leaf::buffer_bytes) const {
    std::vector<size_t> sizes;
    if (masked) sizes.push_back(static_cast<size_t>(mask_rows));
    for (const Leaf& leaf : args) sizes.push_back((leaf.*bytes)());
    if (tap && tap->always) sizes.push_back(sizeof(bool));
    return sizes;
  }
  std::vector<size_t> OutputSizes(Bytes bytes = &Leaf::buffer_bytes) const {
    std::vector<size_t> sizes;
    for (const Leaf& leaf : tap && tap->through ? args : results) {
      sizes.push_back((leaf.*bytes)());
    }
    if (returns_outcome) sizes.push_back(kOutcomeBytes);
    if (tap && tap->linked) sizes.push_back(sizeof(int32_t));
    return sizes;
  }

  /// Whether `where` keeps all rows of these operands from the function.
  bool KeepsBack(const void* const* operands) const {
    if (!masked) return false;
    const bool* mask = static_cast<const bool*>(operands[0]);
    return std::find(mask, mask + mask_rows, true) == mask + mask_rows;
  }

  /// An event of this plan that begins at `start`. A feed's call is a wait.
  Event NewEvent(EventKind kind, int device, int64_t run, int64_t start) const {
    Event event;
    event.kind = feed && kind == EventKind::kCall ? EventKind::kFeed : kind;
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
  Counted<Plan> plan;
  /// Python destroys it, with the GIL: an eager call is the only use of its plan.
  ~PlanHandle() { plan.DropHere(); }
};

}  // namespace hostcall
