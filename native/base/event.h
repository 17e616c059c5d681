// One thing that happened: a call, a tap, a delivery, a wait.
//
// The flight recorder (flight.h) keeps the newest events.
//
// Does not depend on Python (tests/native/flight_test.cc).
#pragma once

#include <cstdint>

namespace hostcall {

/// Python sees these as numbers, named in _api/flight.py in the same order.
enum class EventKind : uint8_t {
  kCall,      ///< a call of Python, from before the wait for the GIL to its end
  kTap,       ///< a device hands values to the queue
  kDelivery,  ///< the worker calls a tap's function
  kTeam,      ///< a device is in a call that several devices make together
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
  /// Of a tap or delivery, its position in the queue; else -1.
  int64_t number = -1;
};

}  // namespace hostcall
