// One thing that happened: a call, a tap, a delivery, a wait.
//
// The flight recorder (flight.h) keeps the newest events; while somebody traces,
// the EventBuffer keeps all of them until they are taken.
//
// Does not depend on Python (tests/native/flight_test.cc).
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/no_copy.h"

namespace hostcall {

/// Python sees these as numbers, named in _runtime/waits.py and
/// _api/flight.py in the same order.
enum class EventKind : uint8_t {
  kCall,      ///< a call of Python, from before the wait for the GIL to its end
  kTap,       ///< a device hands values to the queue
  kDelivery,  ///< the worker calls a tap's function
  kTeam,      ///< a device is in a call that several devices make together
  kRow,       ///< a worker runs rows of a call with vmap_method="parallel"
  kWait,      ///< a Python thread waits in hc.barrier
  kFeed,      ///< a device waits for an item of a feed
};

enum class EventState : uint8_t {
  kWaiting,  ///< for the GIL; for a tap: for space in the queue
  kRunning,
  kEnded,
  kFailed,  ///< the function failed; for a tap: it was dropped
};

struct Event {
  EventKind kind = EventKind::kCall;
  EventState state = EventState::kWaiting;
  int16_t device = -1;  ///< ordinal; -1 outside of any program
  uint32_t place = 0;   ///< the number of the place in the user's source (places.h)
  int64_t start = 0;    ///< in ticks (clock.h)
  /// When a call held the GIL, in ticks; 0 before, and for others.
  int64_t entered = 0;
  int64_t end = 0;    ///< in ticks; 0 before
  int64_t bytes = 0;  ///< of the arguments and results
  int64_t run = -1;   ///< XLA's number of the execution; -1 if none
  /// Of a tap or delivery, its position in the queue; else a row.
  int64_t number = -1;
  int64_t count = 1;    ///< rows of a call; taps of a delivery
  uint64_t thread = 0;  ///< Python's identifier of the thread
};

/// Python's identifier of the calling thread, as PyThread_get_thread_ident returns
/// it. A pthread_t is a number on Linux and a pointer on macOS: this cast takes
/// both.
inline uint64_t ThisThread() { return (uint64_t)pthread_self(); }

/// Events on their way to a tool that traces.
///
/// Guarantees
///   * While nobody traces, an event costs one relaxed load of a flag.
///   * Memory is bounded. A push that finds the buffer full drops its event and
///     counts it; it never waits.
///   * Events are taken in the order in which their pushes took their cells.
///
/// A ring of cells, each with a number that says whose turn it is: `n` when it
/// waits for the n-th event, `n + 1` when it has it. Pushers take a cell by a
/// compare-and-swap on `head_`, and hand it over by a release store of the cell's
/// number, which Take loads with acquire. Take gives the cell back in the same way,
/// to the pusher of the next round. `head_` only hands out numbers, so it is
/// relaxed: a pusher that reads an old one finds the cell taken. There is one taker
/// at a time (its callers hold a lock of their own). A pusher that is stopped
/// between the two holds up the events behind it until it goes on, and loses none.
class EventBuffer {
 public:
  /// About 5 MB, which are allocated when the first trace begins.
  static constexpr size_t kCapacity = size_t{1} << 16;

  explicit EventBuffer(size_t capacity = kCapacity)
      : mask_(capacity - 1), cells_(new Cell[capacity]) {
    for (size_t i = 0; i < capacity; ++i) {
      cells_[i].turn.store(i, std::memory_order_relaxed);  // nobody has it yet
    }
  }

  /// The buffer of the process. Not freed after a trace: threads that have seen the
  /// flag may still push.
  static EventBuffer& Get() { return Immortal<EventBuffer>(); }
  /// Whether somebody traces. Relaxed: events around the switch may be missed.
  static bool IsOn() { return g_on.load(std::memory_order_relaxed); }
  static void Switch(bool on) {
    Get();  // allocates now, not in a handler
    g_on.store(on, std::memory_order_relaxed);
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
  std::atomic<int64_t> dropped_{0};            ///< relaxed: it publishes nothing
  alignas(64) uint64_t tail_ = 0;  ///< the next cell to read; the taker's alone
};

}  // namespace hostcall
