// A call under way: found by the thread that makes it, and by all others.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/plan.h"

namespace hostcall {

/// A call under way. Lives on the stack of the thread that makes it, in a list of
/// all and in a chain of its own thread's; both are touched with the GIL held.
struct ActiveCall {
  const Plan* plan = nullptr;
  const std::vector<int64_t>* row = nullptr;  ///< place in the batch, or null
  std::vector<int64_t> failed_row;            ///< the place where it failed
  int device_ordinal = -1;                    ///< -1 where no program runs (eager)
  int64_t start = 0;                          ///< in ticks (clock.h)
  unsigned long thread_id = 0;
  int64_t run = -1;               ///< XLA's number of the execution
  void* stream = nullptr;         ///< of a GPU, in a call on its memory
  const TapEvent* tap = nullptr;  ///< what is delivered, or null for a call
  bool foreign = false;           ///< Python did not start the thread
  bool counted = false;           ///< it is one of the engine's calls in flight
  bool interrupted = false;       ///< KeyboardInterrupt was sent to its thread
  ActiveCall* outer = nullptr;  ///< the call of this thread that encloses this one
  ActiveCall* prev = nullptr;
  ActiveCall* next = nullptr;

  /// Whether the operands and results are a GPU's.
  bool on_gpu() const { return stream != nullptr; }
};

/// The calling thread's innermost call, or null.
ActiveCall* CurrentCall();
/// Head of the list of all calls under way. The GIL is held.
ActiveCall* AllCalls();
/// Raises KeyboardInterrupt in the calls that run on threads that Python did not
/// start, and says in how many. With `taps` also in the tap that is being
/// delivered. The GIL is held.
int InterruptForeignCalls(bool taps = false);
/// The same for the tap that is being delivered alone.
int InterruptTaps();
/// Whether every call in flight runs on one of these threads. Exact: with the GIL,
/// which is held, no call comes to the list or leaves it, and one that is on the
/// list is in the engine's count.
bool OnlyOnThreads(const std::vector<unsigned long>& threads);
/// A forked child inherits the list but not the threads it speaks of.
void ForgetCallsAfterFork();

/// What looks at the programs that a call starts.
enum class Lookout {
  kGuard,   ///< the plan's guard, or what looked before
  kScout,   ///< the plan's scout
  kInside,  ///< the call runs inside a host callback: no scout, not an outer call's
};

/// Registers a call for its life, and makes host code's device its default. The
/// GIL is held when it is made and when it goes.
class CallScope {
 public:
  /// `run` is XLA's number of the execution, -1 where there is none.
  CallScope(const Plan& plan, int device_ordinal, int64_t run,
            Lookout lookout = Lookout::kGuard);
  ~CallScope();
  CallScope(const CallScope&) = delete;
  CallScope& operator=(const CallScope&) = delete;
  ActiveCall& call() { return call_; }

 private:
  ActiveCall call_;
  Ref saved_[4];  ///< what each ambient setting was before
};

/// What a thread-local setting of JAX's is set to while host code runs.
enum class Ambient {
  kFixed,   ///< the value that it was registered with
  kDevice,  ///< the plan's device
  kGuard,   ///< the plan's guard or scout; left alone by plans without one
  kWith,    ///< as kFixed, and only ever set by who sets the one before it too
};

/// Registers one of JAX's settings, and the methods of its class. `unset` is what
/// `get` gives on a thread that has not set it; a fixed one is then left alone.
void AddAmbientSetting(Ambient kind, PyObject* self, PyObject* swap, PyObject* set,
                       PyObject* get, PyObject* value, PyObject* unset);

/// Tells that XLA owns the calling thread.
void MarkForeignThread();
bool OnForeignThread();

}  // namespace hostcall
