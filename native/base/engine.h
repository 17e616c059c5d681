// Whether the engine accepts calls, and how many are in flight.
//
// Does not depend on Python (tests/native/engine_test.cc).
//
// Guarantee: once Close has returned and WaitIdle has returned true, no call enters
// Python any more, so the interpreter may finalize. (Unless OpenLate was called:
// then its function answers for each call.)
//
//   1. handler: Enter adds one to in_flight_, then reads closed_
//   2. exit:    Close sets closed_, then WaitIdle reads in_flight_
//
// All four are sequentially consistent, so at least one side sees the other: a call
// that missed the flag is in the count, and WaitIdle waits for it. Weaker orders
// would not do: with release and acquire, both sides may read the old value.
//
// Daemon threads. Python does not wait for its daemon threads at exit, so calls on
// them are left behind too. When such a call ends, its thread must not return to
// JAX's C++, which would ask for the GIL while the interpreter finalizes: the
// thread stays in the engine for ever (run_call.cc), and its call stays in the
// count.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#include "base/no_copy.h"

namespace hostcall {

/// Safe to use from several threads.
class Engine {
 public:
  /// The engine of the process.
  static Engine& Get() { return Immortal<Engine>(); }

  /// Begins a call. False: the engine is closed, and the caller must not touch
  /// Python or call Leave.
  bool Enter() {
    in_flight_.fetch_add(1);
    if (!closed_.load()) return true;
    bool (*const admits)() = late_.load();
    if (admits != nullptr && admits()) return true;
    Leave();  // it was in the count for a moment, which only delays WaitIdle
    return false;
  }
  /// Ends a call that Enter admitted. Release: WaitIdle, which reads the count,
  /// comes behind all that the call did.
  void Leave() { in_flight_.fetch_sub(1, std::memory_order_release); }

  /// Refuses calls from now on. Those in flight go on.
  void Close() { closed_.store(true); }

  /// Waits until no call is in flight, for at most `seconds`; false if some still
  /// are. The caller does not hold the GIL, which the calls need in order to end.
  /// It polls, since it runs only at exit: a condition variable would make each
  /// call pay for it.
  bool WaitIdle(double seconds) const {
    const auto end =
        std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    // Below zero: a callback forked, and has left the engine in the child, whose
    // count began at zero.
    while (in_flight_.load() > 0) {
      if (std::chrono::steady_clock::now() > end) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    return true;
  }

  /// From now on, a thread that Python started stays in the engine when its call
  /// ends (IsLeftBehind). The calling thread, which finalizes the interpreter, is
  /// exempt.
  void LeaveBehind() {
    ender_ = std::this_thread::get_id();
    left_behind_.store(true);
  }

  /// After Close and WaitIdle: from now on this function decides which calls a
  /// closed engine makes all the same. It may wait for the GIL.
  void OpenLate(bool (*admits)()) { late_.store(admits); }

  /// Closes the engine in a forked child. The threads whose calls were counted do
  /// not exist there, nor do XLA's, so no call can run and none will ever end.
  void CloseAfterFork() {
    forked_.store(true);
    late_.store(nullptr);
    closed_.store(true);
    in_flight_.store(0);
  }

  /// Whether Close or CloseAfterFork was called.
  bool closed() const { return closed_.load(); }
  /// Whether this process is a forked child.
  bool forked() const { return forked_.load(); }
  /// Whether the calling thread, which Python started, must not leave the engine.
  bool IsLeftBehind() const {
    return left_behind_.load() && std::this_thread::get_id() != ender_;
  }
  /// Calls between Enter and Leave.
  int64_t in_flight() const { return in_flight_.load(); }

 private:
  // in_flight_ and closed_ need the order that they have (above). The others have
  // it too, though a release and an acquire would do: left_behind_ publishes
  // ender_, and late_ and forked_ are read only by calls that are refused.
  std::atomic<bool> closed_{false};        ///< no new calls; never reset
  std::atomic<bool (*)()> late_{nullptr};  ///< OpenLate's
  std::atomic<bool> forked_{false};        ///< this is a forked child; never reset
  std::atomic<bool> left_behind_{false};   ///< LeaveBehind was called; never reset
  /// The thread that finalizes the interpreter. Not atomic: it is written once,
  /// before left_behind_ is set, and read only by threads that have seen
  /// left_behind_ set.
  std::thread::id ender_;
  std::atomic<int64_t> in_flight_{0};
};

/// Enters the engine for the guard's life; converts to false if it was refused.
class Entry : NoCopy {
 public:
  Entry() : entered_(Engine::Get().Enter()) {}
  ~Entry() {
    if (entered_) Engine::Get().Leave();
  }
  explicit operator bool() const { return entered_; }

 private:
  bool entered_;
};

}  // namespace hostcall
