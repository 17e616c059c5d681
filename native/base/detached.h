// Releases the GIL around a handler, whoever calls it.
//
// XLA enters handlers without the GIL, but a caller of XLA may hold it when XLA
// runs the program on the same thread. A handler may wait (for space in a queue,
// for a team, for a stream), and what it waits for may need the GIL. So Guarded
// (ffi.h) releases the GIL first.
//
// Does not depend on Python: the body is in guards.cc, and tests/native has its
// own.
#pragma once

namespace hostcall {

/// Releases the GIL for the guard's life, if the calling thread holds it.
class Detached {
 public:
  Detached();
  ~Detached();
  Detached(const Detached&) = delete;
  Detached& operator=(const Detached&) = delete;

 private:
  void* state_;  ///< the PyThreadState to restore; null if the GIL was not held
};

}  // namespace hostcall
