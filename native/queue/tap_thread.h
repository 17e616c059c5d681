// Tells whether the calling thread is the one that delivers taps.
//
// Does not depend on Python.
#pragma once

namespace hostcall {

/// Marks the calling thread as the one that delivers taps, for the guard's life. A
/// tap that this thread pushes (from inside a delivery) must never wait for space,
/// since only this thread makes space.
class TapThread {
 public:
  TapThread() { Mark() = true; }
  ~TapThread() { Mark() = false; }
  TapThread(const TapThread&) = delete;
  TapThread& operator=(const TapThread&) = delete;

  /// Whether the calling thread is marked.
  static bool IsThis() { return Mark(); }

 private:
  static bool& Mark() {
    static thread_local bool delivers = false;
    return delivers;
  }
};

}  // namespace hostcall
