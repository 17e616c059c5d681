// Which thread delivers taps.
//
// Knows no Python.
#pragma once

namespace hostcall {

/// Marks the calling thread as the one that delivers, for the guard's life. A tap
/// that such a thread pushes must never wait for space: only its own thread makes
/// space.
class TapThread {
 public:
  TapThread() { Mark() = true; }
  ~TapThread() { Mark() = false; }
  TapThread(const TapThread&) = delete;
  TapThread& operator=(const TapThread&) = delete;

  /// Whether the calling thread is the one that delivers.
  static bool IsThis() { return Mark(); }

 private:
  static bool& Mark() {
    static thread_local bool delivers = false;
    return delivers;
  }
};

}  // namespace hostcall
