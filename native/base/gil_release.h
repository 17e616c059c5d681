// Releases the GIL around what may wait for another thread.
//
// Handlers too (ffi.h), whoever calls them: XLA enters them without the GIL, but a
// caller of XLA may hold it when XLA runs the program on the same thread. A handler
// may wait (for space in a queue, for a team, for a stream), and what it waits for
// may need the GIL.
//
// Does not depend on Python: the bodies are in guards.cc, and tests/native has its
// own.
#pragma once

#include "base/no_copy.h"

namespace hostcall {

/// Releases the GIL for the guard's life, if the calling thread holds it and
/// `release` is true. No Python object may be touched meanwhile.
class GilRelease : NoCopy {
 public:
  explicit GilRelease(bool release = true)
      : state_(release ? Release() : nullptr) {}
  ~GilRelease() {
    if (state_ != nullptr) Restore(state_);
  }

 private:
  static void* Release();  ///< null if the thread does not hold the GIL
  static void Restore(void* state);
  void* const state_;  ///< the PyThreadState to restore; null: nothing was released
};

}  // namespace hostcall
