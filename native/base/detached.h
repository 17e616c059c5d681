// Without Python's lock: what every handler is, whoever calls it.
//
// XLA enters handlers without the GIL, but nothing keeps a caller of XLA from
// holding it. A handler may wait (for space in a queue, for a team, for a stream),
// and what it waits for may need the GIL. So Guarded (ffi.h) lets go of it first.
//
// Knows no Python: the programs of tests/native have a body of their own for it.
#pragma once

namespace hostcall {

/// Lets go of the GIL for its life, where the calling thread holds it.
class Detached {
 public:
  Detached();
  ~Detached();
  Detached(const Detached&) = delete;
  Detached& operator=(const Detached&) = delete;

 private:
  void* state_;  ///< of the thread that held it; else null
};

}  // namespace hostcall
