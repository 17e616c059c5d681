// Calls under way, and the settings of JAX that host code runs with.
//
// A CallScope registers a call for its life. The thread that makes the call finds
// it as CurrentCall (hc.current()), and other threads find it by ForEachCall
// (hc.monitor.status(), Ctrl-C, the end of the process). The calling thread is
// attached in all functions here.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <vector>

#include "base/no_copy.h"
#include "plan/plan.h"

namespace hostcall {

/// A call under way. Lives on the stack of the thread that makes it, which sets its
/// fields before it makes a CallScope. Then it is in its group's list of calls and
/// in a chain of its thread's calls.
///
/// What other threads read does not change while it is in the list, but for `row`
/// and `interrupted`, which the group's mutex guards.
struct ActiveCall {
  ActiveCall(const Execution& execution, int64_t start_ticks)
      : plan(&execution.plan),
        device_ordinal(execution.device),
        run(execution.run),
        start(start_ticks),
        stream(execution.stream) {}

  const Plan* plan;  ///< outlives the call; not owned
  /// The position of the row that the function runs on now; null if rows are not
  /// called one by one. Points into the walk over the rows, on the same stack. Set
  /// by RowMark.
  const std::vector<int64_t>* row = nullptr;
  /// The position of the row that failed; empty if no row has one. Written by the
  /// calling thread: by the walk over the rows, or, where rows run together, by the
  /// layer that runs them (_native.failed_row), which alone knows the row.
  std::vector<int64_t> failed_row;
  int device_ordinal;             ///< -1 if no program runs (an eager call)
  int64_t run;                    ///< XLA's number of the execution; -1 if none
  int64_t start;                  ///< when it began, in ticks (clock.h)
  void* stream;                   ///< XLA's stream in a call on GPU memory, or null
  unsigned long thread_id = 0;    ///< Python's identifier of the thread
  const TapEvent* tap = nullptr;  ///< the event being delivered; null for a call
  size_t taps = 0;  ///< events in the run that begins with `tap`; 0 if it is alone
  int64_t executions_before = -1;  ///< in this run; -1: not counted
  // Only the calling thread uses these three.
  bool scouts = false;          ///< it may be repeated inside a host callback
  bool asked = false;           ///< its function has asked for that (AskInside)
  bool inside = false;          ///< it runs inside a host callback
  bool foreign = false;         ///< the thread is XLA's, not Python's
  bool counted = false;         ///< included in Engine::in_flight
  bool interrupted = false;     ///< KeyboardInterrupt was sent to its thread
  ActiveCall* outer = nullptr;  ///< the enclosing call of this thread, or null
  ActiveCall* prev = nullptr;   ///< the next newer call of the group, or null
  ActiveCall* next = nullptr;   ///< the next older call of the group, or null

  /// Notes the row at which the walk ended. A walk over one row has no position,
  /// and leaves what a layer has noted.
  void FailedAt(const std::vector<int64_t>& index) {
    if (!index.empty()) failed_row = index;
  }
  /// Whether the operands and results are in a GPU's memory.
  bool on_gpu() const { return stream != nullptr; }
};

/// The calling thread's innermost call, or null.
ActiveCall* CurrentCall();
/// The calls under way of one group of threads.
struct alignas(64) CallList {
  AttachedMutex mutex;
  ActiveCall* newest = nullptr;  ///< or null; the others follow by `next`
};
/// The lists of all groups. A list is read and changed under its mutex.
extern std::array<CallList, kGroups> g_calls;
/// `see(call)` for each call under way, those of a thread from the innermost to the
/// outermost. It makes no Python object and waits for nothing.
template <typename See>
void ForEachCall(See see) {
  for (CallList& list : g_calls) {
    const std::lock_guard<AttachedMutex> lock(list.mutex);
    for (ActiveCall* call = list.newest; call != nullptr; call = call->next) {
      see(*call);
    }
  }
}
/// Sets ActiveCall::row of a call of the calling thread for the guard's life.
class RowMark : NoCopy {
 public:
  RowMark(ActiveCall& call, const std::vector<int64_t>* row) : call_(call) {
    Set(row);
  }
  ~RowMark() { Set(nullptr); }

 private:
  void Set(const std::vector<int64_t>* row) {
    const std::lock_guard<AttachedMutex> lock(g_calls[Group()].mutex);
    call_.row = row;
  }
  ActiveCall& call_;
};
/// Raises KeyboardInterrupt in the calls on threads that Python did not start, and
/// in the tap that is being delivered. Returns the number of those threads.
int InterruptCalls(bool calls, bool taps);
/// Whether every call in flight runs on one of these threads. The answer is exact:
/// meanwhile no call enters or leaves the lists, and every counted call on a list
/// is in the engine's count.
bool OnlyOnThreads(const std::vector<unsigned long>& threads);
/// Empties the list in a forked child, which inherits it, but not the threads of
/// its calls.
void ForgetCallsAfterFork();

/// Asks for the innermost call of the calling thread that scouts to be repeated
/// inside a host callback. False: there is none, or a call inside it already runs
/// in one, where no program waits. A guard on the thread may be that of a call that
/// has ended, and asks in vain.
bool AskInside();

/// Registers a call for the guard's life, and sets JAX's settings for host code:
/// the ambient ones (Ambient), and those of the trace, if it had any of its own
/// (Plan::enter).
class CallScope : NoCopy {
 public:
  explicit CallScope(ActiveCall& call);
  ~CallScope();

 private:
  ActiveCall& call_;
  /// The former value of each ambient setting; null if the destructor leaves it
  /// alone.
  Ref saved_[4];
  Ref entered_;  ///< what Plan::leave takes; null if nothing was entered
};

/// What a thread-local setting of JAX is set to while host code runs.
enum class Ambient {
  kFixed,   ///< the value that was registered
  kDevice,  ///< the plan's device
  kGuard,   ///< the plan's guard; a call that needs none leaves it alone
  kWith,  ///< as kFixed, for a setting that is unset if the preceding kFixed one is
};

/// One of JAX's thread-local settings, with methods of its class, which are called
/// with `self`: bound methods would cost one call more.
struct AmbientSetting {
  Ambient kind;
  PyObject* self;
  PyObject* swap;   ///< (self, value) -> the former value
  PyObject* set;    ///< (self, value)
  PyObject* get;    ///< (self) -> the value of the calling thread
  PyObject* value;  ///< what host code gets, for kFixed and kWith; else null
  PyObject* unset;  ///< what `get` returns on a thread that has set nothing; there,
                    ///< a fixed setting is left alone
};
/// Keeps a reference to each object, for ever. Called when the engine starts,
/// before any call. Settings after the fourth are ignored.
void AddAmbientSetting(const AmbientSetting& added);

/// Whether the calling thread is XLA's: a guard has made its thread state.
inline bool OnForeignThread() { return t_made_state != nullptr; }

/// Never returns if Python started the calling thread, and finalizes: the thread is
/// a daemon, and would return into JAX's C++, which asks for the GIL
/// (base/engine.h).
void StayIfLeftBehind();

/// Whether the calling thread returns to Python code, where JAX may raise what a
/// call failed with: it is one of Python's, or one of XLA's with a callback around
/// it.
inline bool ReturnsToPython() {
  return !OnForeignThread() || CurrentCall() != nullptr;
}

}  // namespace hostcall
