// Those who wait for space in the queue of taps.
//
// Knows no Python (tests/native/tap_queue_test.cc). The race between a full queue
// and its relief is told in tap_queue.h.
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
  /// Waits until `enough()`, which is asked again after each Freed.
  template <typename Enough>
  void Wait(Enough enough) {
    std::unique_lock<std::mutex> lock(mutex_);
    const int64_t before = interrupts_;
    waiters_.fetch_add(1);
    changed_.wait(lock, [&] { return enough() || interrupts_ != before; });
    waiters_.fetch_sub(1);
    if (interrupts_ != before) throw PushInterrupted(text_);
  }

  /// To be called after there is more space, or no more need to wait.
  void Freed() {
    if (waiters_.load() == 0) return;
    std::lock_guard<std::mutex> lock(mutex_);
    changed_.notify_all();
  }

  /// Ends the waits that are under way; they throw PushInterrupted(text).
  void Interrupt(std::string text) {
    std::lock_guard<std::mutex> lock(mutex_);
    ++interrupts_;
    text_ = std::move(text);
    changed_.notify_all();
  }

  int64_t waiters() const { return waiters_.load(); }

 private:
  std::atomic<int64_t> waiters_{0};
  std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  int64_t interrupts_ = 0;
  std::string text_;
};

}  // namespace hostcall
