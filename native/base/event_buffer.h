// Events on their way to a tool that traces.
//
// Does not depend on Python (tests/native/flight_test.cc).
//
// Guarantees
//   * While nobody traces, an event costs one relaxed load of a flag.
//   * Memory is bounded. A push that finds the buffer full drops its event and
//     counts it; it never waits.
//   * Events are taken in the order in which their pushes took their cells.
//
// A ring of cells, each with a number that says whose turn it is: `n` when it waits
// for the n-th event, `n + 1` when it has it. Pushers take a cell by a
// compare-and-swap on `head_`, and hand it over by a release store of the cell's
// number, which Take loads with acquire. There is one taker at a time (its callers
// hold a lock of their own). A pusher that is stopped between the two holds up the
// events behind it until it goes on, and loses none.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/event.h"

namespace hostcall {

class EventBuffer {
 public:
  /// About 5 MB, which are allocated when the first trace begins.
  static constexpr size_t kCapacity = size_t{1} << 16;

  explicit EventBuffer(size_t capacity = kCapacity)
      : mask_(capacity - 1), cells_(new Cell[capacity]) {
    for (size_t i = 0; i < capacity; ++i) cells_[i].turn.store(i);
  }

  /// The buffer of the process. Never destroyed, and never freed after a trace:
  /// threads that have seen the flag may still push.
  static EventBuffer& Get() {
    static EventBuffer* buffer = new EventBuffer;
    return *buffer;
  }
  /// Whether somebody traces. Relaxed: events around the switch may be missed.
  static bool IsOn() { return g_on.load(std::memory_order_relaxed); }
  static void Switch(bool on) {
    Get();  // allocates now, not in a handler
    g_on.store(on);
  }

  /// Adds an event, or drops it. Safe from several threads.
  void Push(const Event& event) {
    uint64_t at = head_.load(std::memory_order_relaxed);
    for (;;) {
      Cell& cell = cells_[at & mask_];
      const auto behind =
          static_cast<int64_t>(cell.turn.load(std::memory_order_acquire) - at);
      if (behind < 0) {  // still holds the event of a round before
        dropped_.fetch_add(1, std::memory_order_relaxed);
        return;
      }
      if (behind == 0 &&
          head_.compare_exchange_weak(at, at + 1, std::memory_order_relaxed)) {
        cell.event = event;
        cell.turn.store(at + 1, std::memory_order_release);
        return;
      }
      if (behind > 0) at = head_.load(std::memory_order_relaxed);
    }
  }

  /// Takes the oldest event. False: there is none. One caller at a time.
  bool Take(Event* event) {
    Cell& cell = cells_[tail_ & mask_];
    if (cell.turn.load(std::memory_order_acquire) != tail_ + 1) return false;
    *event = cell.event;
    cell.turn.store(tail_ + mask_ + 1, std::memory_order_release);
    ++tail_;
    return true;
  }

  /// Events that found the buffer full, so far.
  int64_t dropped() const { return dropped_.load(std::memory_order_relaxed); }

 private:
  struct Cell {
    std::atomic<uint64_t> turn;
    Event event;
  };
  inline static std::atomic<bool> g_on{false};
  const uint64_t mask_;
  const std::unique_ptr<Cell[]> cells_;
  alignas(64) std::atomic<uint64_t> head_{0};  ///< the next cell to write
  std::atomic<int64_t> dropped_{0};
  alignas(64) uint64_t tail_ = 0;  ///< the next cell to read; the taker's alone
};

}  // namespace hostcall
