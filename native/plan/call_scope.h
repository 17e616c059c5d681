// Calls under way, and the settings of JAX that host code runs with.
//
// A CallScope registers a call for its life. The thread that makes the call finds
// it as CurrentCall (hc.current()), and other threads find it in AllCalls
// (hc.monitor.status(), Ctrl-C, the end of the process). Everything here happens
// with the GIL held, which guards the list and all fields.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/plan.h"

namespace hostcall {

class FeedTake;  // plan/feed_take.h

/// A call under way. Lives on the stack of the thread that makes it. It is in a
/// list of all calls and in a chain of its thread's calls.
struct ActiveCall {
  const Plan* plan = nullptr;  ///< outlives the call; not owned
  /// The position of the row that the function runs on now; null if rows are not
  /// called one by one. Points into the walk over the rows, on the same stack.
  const std::vector<int64_t>* row = nullptr;
  std::vector<int64_t> failed_row;  ///< the position of the row that failed
  int device_ordinal = -1;          ///< -1 if no program runs (an eager call)
  int64_t start = 0;                ///< when it began, in ticks (clock.h)
  unsigned long thread_id = 0;      ///< Python's identifier of the thread
  int64_t run = -1;                 ///< XLA's number of the execution; -1 if none
  void* stream = nullptr;         ///< XLA's stream in a call on GPU memory, or null
  const TapEvent* tap = nullptr;  ///< the event being delivered; null for a call
  size_t taps = 0;  ///< events in the run that begins with `tap`; 0 if it is alone
  const Before* before = nullptr;  ///< with `keep=`: the executions before; or null
  FeedTake* feed = nullptr;        ///< of a feed: how far it came; else null
  bool foreign = false;            ///< the thread is XLA's, not Python's
  bool counted = false;            ///< included in Engine::in_flight
  bool interrupted = false;        ///< KeyboardInterrupt was sent to its thread
  ActiveCall* outer = nullptr;     ///< the enclosing call of this thread, or null
  ActiveCall* prev = nullptr;      ///< the next newer call, or null
  ActiveCall* next = nullptr;      ///< the next older call, or null

  /// Whether the operands and results are in a GPU's memory.
  bool on_gpu() const { return stream != nullptr; }
};

/// The calling thread's innermost call, or null.
ActiveCall* CurrentCall();
/// The newest of all calls under way, or null; the others follow by `next`.
ActiveCall* AllCalls();
/// Raises KeyboardInterrupt in the calls on threads that Python did not start, and
/// returns the number of those threads. With `taps`, also in the tap that is being
/// delivered.
int InterruptForeignCalls(bool taps = false);
/// Raises KeyboardInterrupt in the tap that is being delivered; returns 1 if there
/// is one, else 0.
int InterruptTaps();
/// Whether every call in flight runs on one of these threads. The answer is exact:
/// with the GIL held no call enters or leaves the list, and every counted call on
/// the list is in the engine's count.
bool OnlyOnThreads(const std::vector<unsigned long>& threads);
/// Empties the list in a forked child, which inherits it, but not the threads of
/// its calls.
void ForgetCallsAfterFork();

/// What examines the programs that host code starts during a call (see Inside in
/// plan.h and docs/design/threads.md).
enum class Lookout {
  kGuard,  ///< the plan's guard; without one, whatever the thread has set
  kScout,  ///< the plan's scout
  /// The plan's guard. The call runs inside a host callback, where programs can't
  /// deadlock, so the scout of an enclosing call is removed.
  kInside,
};

/// Registers a call for the guard's life, and sets JAX's settings for host code
/// (Ambient). The GIL is held when it is made and when it is destroyed.
class CallScope {
 public:
  /// `run` is XLA's number of the execution; -1 if there is none.
  CallScope(const Plan& plan, int device_ordinal, int64_t run,
            Lookout lookout = Lookout::kGuard);
  ~CallScope();
  CallScope(const CallScope&) = delete;
  CallScope& operator=(const CallScope&) = delete;
  ActiveCall& call() { return call_; }

 private:
  ActiveCall call_;
  /// The former value of each ambient setting; null if the destructor leaves it
  /// alone.
  Ref saved_[4];
};

/// What a thread-local setting of JAX is set to while host code runs.
enum class Ambient {
  kFixed,   ///< the value that was registered
  kDevice,  ///< the plan's device
  kGuard,   ///< the plan's guard or scout; a plan without one leaves it alone
  kWith,  ///< as kFixed, for a setting that is unset if the preceding kFixed one is
};

/// Registers `self`, one of JAX's thread-local settings, with the methods of its
/// class. `value` is for kFixed and kWith, else null. `unset` is what `get` returns
/// on a thread that has set nothing; there, a fixed setting is left alone. Keeps a
/// reference to each object, for ever. The GIL is held. Settings after the
/// fourth are ignored.
void AddAmbientSetting(Ambient kind, PyObject* self, PyObject* swap, PyObject* set,
                       PyObject* get, PyObject* value, PyObject* unset);

/// Marks the calling thread as one that Python did not start.
void MarkForeignThread();
/// Whether the calling thread was marked so.
bool OnForeignThread();

}  // namespace hostcall
