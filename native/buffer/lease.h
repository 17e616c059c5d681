// How long a Python object of a call may be used.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#include "base/engine.h"
#include "base/free_threads.h"
#include "plan/call_scope.h"

namespace hostcall {

/// What a Python object may use of a call, until the call ends. The objects' memory
/// is zeroed, which makes it an ended one.
class Lease {
 public:
  /// Begins a call. Called while nobody else has the object.
  void Begin(const ActiveCall& call) { call_.store(&call, kOrder); }
  /// Ends it: no use begins afterwards, and none is under way.
  void End() {
    call_.store(nullptr, kOrder);
    // A use is short, and may need the interpreter. In a forked child, the threads
    // whose uses are counted do not exist.
    while (kFreeThreads && uses_.load() != 0 && !Engine::Get().forked()) {
      GilRelease unlocked;
      std::this_thread::sleep_for(std::chrono::microseconds(10));
    }
  }

  /// A use of the object, for the guard's life. It converts to false if the call
  /// has ended.
  class Use {
   public:
    explicit Use(Lease& lease) : lease_(lease) {
      if (kFreeThreads) lease.uses_.fetch_add(1);
      call_ = lease.call_.load(kOrder);
    }
    ~Use() {
      if (kFreeThreads) lease_.uses_.fetch_sub(1);
    }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    explicit operator bool() const { return call_ != nullptr; }
    const ActiveCall* operator->() const { return call_; }
    const ActiveCall& operator*() const { return *call_; }

   private:
    Lease& lease_;
    const ActiveCall* call_;
  };

 private:
  /// As in base/engine.h, at least one side sees the other: a use that missed the
  /// end is counted. The GIL needs no order.
  static constexpr auto kOrder =
      kFreeThreads ? std::memory_order_seq_cst : std::memory_order_relaxed;
  std::atomic<const ActiveCall*> call_;  ///< not owned; null: ended
  std::atomic<int32_t> uses_;            ///< not counted if there is a GIL
};

}  // namespace hostcall
