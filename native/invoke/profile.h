// What a profile of JAX's shows besides XLA's operations: calls, deliveries of
// taps, and how long they have waited (_runtime/profiles.py).
#pragma once

#include <atomic>
#include <cstdint>

#include "base/clock.h"
#include "base/guards.h"
#include "base/no_copy.h"

namespace hostcall {

/// Whether a profile was being taken within the last 0.1 ms; asking takes longer
/// than reading a clock, and calls come in thousands. The GIL is held.
inline bool IsProfiled(int64_t now_ticks) {
  // Relaxed: whoever reads an old one asks again, or is late by one look.
  static std::atomic<int64_t> looked{0};
  static std::atomic<bool> is_profiled{false};
  constexpr double kSeconds = 1e-4;
  const int64_t before = looked.load(std::memory_order_relaxed);
  if (before != 0 && TicksToSeconds(now_ticks - before) < kSeconds) {
    return is_profiled.load(std::memory_order_relaxed);
  }
  if (HookOf(Hook::kProfiled) == nullptr) return false;
  looked.store(now_ticks, std::memory_order_relaxed);
  const Ref answer = CallHook(Hook::kProfiled);
  if (!answer) PyErr_Clear();
  is_profiled.store(answer.get() == Py_True, std::memory_order_relaxed);
  return answer.get() == Py_True;
}

/// From its beginning to its end, a profile shows what this thread does. The GIL is
/// held at both, and no Python error is set.
class Annotation : NoCopy {
 public:
  ~Annotation() {
    if (shown_ && !CallMethod(shown_, "end")) PyErr_Clear();
  }

  /// `hooks` are the plan's; `tap` is the number of the delivered tap, or -1;
  /// `waited` says for how many seconds a call has waited for the GIL.
  void Begin(const Ref& hooks, int64_t tap, double waited) {
    const Ref number = Ref::Steal(PyLong_FromLongLong(tap));
    const Ref microseconds = Ref::Steal(PyFloat_FromDouble(1e6 * waited));
    shown_ = CallHook(Hook::kShown, hooks, number, microseconds);
    if (!shown_) PyErr_Clear();
  }

 private:
  Ref shown_;  ///< the `Shown` of _runtime/profiles.py, which has begun; or null
};

}  // namespace hostcall
