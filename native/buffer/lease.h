// How long a Python object of a call may be used.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#include "base/engine.h"
#include "base/free_threads.h"
#include "base/no_copy.h"
#include "plan/call_scope.h"

namespace hostcall {

/// What a Python object may use of a call, until the call ends. A new one has
/// ended.
class Lease {
 public:
  /// Begins a call. Called while nobody else has the object.
  void Begin(const ActiveCall& call) { call_.store(&call, kOrder); }
  /// Ends it: no use begins afterwards, and none is under way.
  void End() {
    call_.store(nullptr, kOrder);
    // A use is short, and may need the interpreter. In a forked child, the threads
    // whose uses are counted do not exist.
    while (uses_.load() != 0 && !Engine::Get().forked()) {
      GilRelease unlocked;
      std::this_thread::sleep_for(std::chrono::microseconds(10));
    }
  }

  /// A use of the object, for the guard's life. It converts to false if the call
  /// has ended.
  class Use : NoCopy {
   public:
    explicit Use(Lease& lease) : lease_(lease) {
      lease.Count(1);
      call_ = lease.call_.load(kOrder);
      // At once: those who ask for an ended one must not keep its end waiting.
      if (call_ == nullptr) lease.Count(-1);
    }
    ~Use() {
      if (call_ != nullptr) lease_.Count(-1);
    }
    explicit operator bool() const { return call_ != nullptr; }
    const ActiveCall* operator->() const { return call_; }
    const ActiveCall& operator*() const { return *call_; }

   private:
    Lease& lease_;
    const ActiveCall* call_;
  };

 private:
  /// The GIL is held, or there is none. It may change hands during a use, which may
  /// run Python code.
  void Count(int n) {
    if (kFreeThreads) {
      uses_.fetch_add(n);
    } else {
      const int now = uses_.load(std::memory_order_relaxed);
      uses_.store(now + n, std::memory_order_relaxed);
    }
  }
  /// As in base/engine.h, at least one side sees the other: a use that missed the
  /// end is counted. The GIL needs no order.
  static constexpr auto kOrder =
      kFreeThreads ? std::memory_order_seq_cst : std::memory_order_relaxed;
  std::atomic<const ActiveCall*> call_{nullptr};  ///< not owned; null: ended
  std::atomic<int32_t> uses_{0};                  ///< under way
};

}  // namespace hostcall
