// What the kinds of equations do differently.
//
// A plan has one Kind, and whoever handles plans asks it, and names no kind. So a
// new kind of equation is one class in one file of native/invoke:
//
//   CallKind    call_kind.h    a Python function gets arrays, and returns results
//   TapKind     taps.h         the operands are queued, and the function runs later
//   FeedKind    feed_kind.h    the results are an item of a ring
//   BufferKind  buffer_kind.h  the function, or native code, works on XLA's memory
//
// Its fields are bound in bindings/kind_bindings.cc; Python makes one for each plan
// (`kind` of the classes in src/hostcall/_engine/params).
//
// An execution comes to its kind in three steps, of which most need the last only:
//
//   1. handler: RunNative, without Python, if the kind has a native part. True says
//               that nothing else is left
//   2. handler: Progress::Wait, if RunNative has left one, still without Python
//   3. handler: attaches to Python, and calls Run. For a tap, whose handler only
//               queues, the worker does so, for each event of the queue
//
// Threads. A kind does not change once its plan is made, so any thread may read it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <typeinfo>
#include <vector>

#include "base/event.h"

namespace hostcall {

class Plan;         // plan/plan.h
struct Leaf;        // plan/plan.h
class Throttle;     // plan/throttle.h
struct ActiveCall;  // plan/call_scope.h

/// One execution of a plan on one device. All that it points to outlives it.
struct Execution {
  const Plan& plan;
  int device;                   ///< ordinal; -1 outside of any program
  int64_t run;                  ///< XLA's number of the execution; -1 if none
  const void* const* operands;  ///< the mask first, if there is one; then arguments
  void* const* results;         ///< null for a tap, which has none
  /// XLA's stream if operands and results are in a GPU's memory; else null.
  void* stream = nullptr;
};

/// How far RunNative has come with an execution that needs Python for the rest.
/// Each kind that makes one has a class of its own, and gets it back in Run.
class Progress {
 public:
  virtual ~Progress() = default;
  /// Waits for a moment for what would end the execution without Python. Whether it
  /// came. The caller does not hold the GIL.
  virtual bool Wait() { return false; }
};

/// One kind of equation, with the settings of one plan.
class Kind {
 public:
  virtual ~Kind() = default;

  /// A copy for this plan, with what the kind derives from the plan's leaves.
  /// Throws std::invalid_argument if a setting makes no sense.
  virtual std::unique_ptr<const Kind> For(const Plan& plan) const = 0;

  // --- What XLA passes

  /// The leaves that XLA gets as results.
  virtual const std::vector<Leaf>& ReturnedLeaves(const Plan& plan) const;
  /// Bytes of the operands behind the arguments.
  virtual std::vector<size_t> ExtraOperands() const { return {}; }
  /// Bytes of the results behind those leaves and the outcome.
  virtual std::vector<size_t> ExtraResults() const { return {}; }
  /// For each result, the number of the argument whose memory it shares, or -1;
  /// empty if the kind shares none.
  std::vector<int> aliases;
  /// Whether a result begins with the values of an argument.
  bool Aliases(size_t result) const {
    return result < aliases.size() && aliases[result] >= 0;
  }
  /// Whether some result shares this argument's memory.
  bool IsShared(size_t arg) const {
    const auto number = static_cast<int>(arg);
    return std::find(aliases.begin(), aliases.end(), number) != aliases.end();
  }

  // --- What a plan and a place of a program keep for it

  /// How many objects the plan keeps from one call for the next (Plan::spares).
  virtual size_t SpareCount(const Plan& plan) const;
  /// The throttle of a new place of a program; null if every execution goes
  /// through.
  virtual std::unique_ptr<Throttle> NewThrottle() const;

  // --- An execution

  /// What the flight recorder calls an execution.
  virtual EventKind event() const { return EventKind::kCall; }
  /// Whether RunNative does anything. It is a field, since each call reads it.
  bool has_native_part = false;
  /// Does what needs no Python. True if that was all; else `*progress` has how far
  /// it came. The caller does not hold the GIL.
  virtual bool RunNative(const Execution&, std::unique_ptr<Progress>*) const {
    return false;
  }
  /// Does the rest, with Python. `progress` is what RunNative has left, or null.
  /// The GIL is held, and may be released meanwhile. False with a Python error set.
  virtual bool Run(const Execution& execution, ActiveCall& call,
                   Progress* progress) const = 0;
};

/// Whether a kind is a K, which nothing derives from.
template <typename K>
bool Is(const Kind& kind) {
  return typeid(kind) == typeid(K);
}

}  // namespace hostcall
