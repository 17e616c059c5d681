// Whether the engine takes calls, and how many are under way.
//
// Knows no Python (tests/native/engine_test.cc).
//
// Guarantee: once Close has returned and WaitIdle has said true, no call enters
// Python any more, so the interpreter may go.
//
//   1. handler: Enter adds one to the count, then reads closed
//   2. exit:    Close sets closed, then WaitIdle reads the count
// Both are sequentially consistent, so at least one sees the other: a call that
// missed the flag is counted, and is waited for.
//
// Calls on daemon threads of Python's are not waited for at exit: they are left
// behind, as Python leaves such threads. One that ends must not go back into JAX's
// C++, which would ask for the GIL while the interpreter goes: it stays in the
// engine (run_call.cc), and in the count.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

namespace hostcall {

class Engine {
 public:
  static Engine& Get() {
    static Engine* engine = new Engine;  // outlives static destruction
    return *engine;
  }

  /// False: the engine is closed, and the caller must not touch Python.
  bool Enter() {
    in_flight_.fetch_add(1);
    if (!closed_.load()) return true;
    in_flight_.fetch_sub(1);
    return false;
  }
  void Leave() { in_flight_.fetch_sub(1); }

  void Close() { closed_.store(true); }

  /// Waits until no call is under way, `seconds` at most. The GIL is not held.
  bool WaitIdle(double seconds) const {
    const auto end =
        std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    while (in_flight_.load() != 0) {
      if (std::chrono::steady_clock::now() > end) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    return true;
  }

  /// From here on calls on threads of Python's stay in the engine when they end.
  /// The calling thread is the one that ends the interpreter.
  void LeaveBehind() {
    ender_ = std::this_thread::get_id();
    left_behind_.store(true);
  }

  /// In a forked child: the threads whose calls were counted do not exist there,
  /// nor do XLA's. Nothing may be called, and nobody is waited for.
  void CloseAfterFork() {
    forked_.store(true);
    closed_.store(true);
    in_flight_.store(0);
  }

  bool closed() const { return closed_.load(); }
  bool forked() const { return forked_.load(); }
  /// Whether the calling thread, one of Python's, has to stay.
  bool IsLeftBehind() const {
    return left_behind_.load() && std::this_thread::get_id() != ender_;
  }
  int64_t in_flight() const { return in_flight_.load(); }

 private:
  std::atomic<bool> closed_{false};
  std::atomic<bool> forked_{false};
  std::atomic<bool> left_behind_{false};
  std::thread::id ender_;  ///< written before left_behind_ is
  std::atomic<int64_t> in_flight_{0};
};

/// Entry for one call, left when the guard goes.
class Entry {
 public:
  Entry() : entered_(Engine::Get().Enter()) {}
  ~Entry() {
    if (entered_) Engine::Get().Leave();
  }
  Entry(const Entry&) = delete;
  Entry& operator=(const Entry&) = delete;
  explicit operator bool() const { return entered_; }

 private:
  bool entered_;
};

}  // namespace hostcall
