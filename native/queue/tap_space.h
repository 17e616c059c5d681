// Where pushes wait for space in a full tap queue.
//
// Does not depend on Python (tests/native/tap_full_test.cc).
//
// Guarantee: a waiter misses neither Freed nor Interrupt. Freed is called for every
// delivered batch, so it must be cheap when nobody waits: it reads one atomic and
// takes the lock only if there is a waiter. Why no wake-up is lost:
//
//   1. device: takes the lock, adds itself to waiters_, then evaluates enough()
//   2. worker: makes more space, then Freed reads waiters_
//
// Both sides use sequentially consistent operations. Either the worker reads the
// waiter, takes the lock (the device is asleep by then, since only sleeping
// releases the lock) and wakes it; or the worker read waiters_ too early, and then
// the device evaluates enough() after the space was made.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

namespace hostcall {

/// Thrown by a push that was interrupted while it waited for space.
struct PushInterrupted : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class TapSpace {
 public:
  /// Waits until `enough()` is true; it is evaluated under the lock, at once and
  /// after each Freed, and must read what Freed announces with sequentially
  /// consistent loads. Throws PushInterrupted if Interrupt ends the wait.
  template <typename Enough>
  void Wait(Enough enough) {
    std::unique_lock<std::mutex> lock(mutex_);
    // A count, not a flag: an interrupt ends the waits that had begun by then, and
    // no later ones, without anybody having to reset it.
    const int64_t before = interrupts_;
    waiters_.fetch_add(1);
    changed_.wait(lock, [&] { return enough() || interrupts_ != before; });
    waiters_.fetch_sub(1);
    if (interrupts_ != before) throw PushInterrupted(text_);
  }

  /// Wakes the waiters. Called after there is more space, or when waiting has
  /// become pointless.
  void Freed() {
    if (waiters_.load() == 0) return;
    std::lock_guard<std::mutex> lock(mutex_);
    changed_.notify_all();
  }

  /// Ends the waits that are under way; they throw PushInterrupted(text). Returns
  /// whether there was one: waiters are counted under the lock, so a device that
  /// was just between two waits is not taken for one.
  bool Interrupt(std::string text) {
    std::lock_guard<std::mutex> lock(mutex_);
    ++interrupts_;
    text_ = std::move(text);
    changed_.notify_all();
    return waiters_.load() > 0;
  }

  int64_t waiters() const { return waiters_.load(); }

 private:
  /// Threads inside Wait. Changed under the lock; Freed reads it without.
  std::atomic<int64_t> waiters_{0};
  // Guards the fields below. Taken by devices that find the queue full, by whoever
  // frees space while a device waits, and by Interrupt; never while a lane is
  // locked.
  std::mutex mutex_;
  std::condition_variable changed_;
  int64_t interrupts_ = 0;  ///< calls of Interrupt so far
  std::string text_;        ///< what the last Interrupt said
};

}  // namespace hostcall
