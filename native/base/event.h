// One thing that happened: a call, a tap, a delivery, a wait.
//
// The flight recorder (flight.h) keeps the newest events; while somebody traces,
// the event buffer (event_buffer.h) keeps all of them until they are taken.
#pragma once

#include <pthread.h>

#include <cstdint>

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
  EventKind kind;
  EventState state;
  int16_t device;  ///< ordinal; -1 outside of any program
  uint32_t place;  ///< the number of the place in the user's source (places.h)
  int64_t start;   ///< in ticks (clock.h)
  int64_t
      entered;     ///< when a call held the GIL, in ticks; 0 before, and for others
  int64_t end;     ///< in ticks; 0 before
  int64_t bytes;   ///< of the arguments and results
  int64_t run;     ///< XLA's number of the execution; -1 if none
  int64_t number;  ///< of a tap or delivery, its position in the queue; else a row
  int64_t count;   ///< rows of a call; taps of a delivery
  uint64_t thread;  ///< Python's identifier of the thread
};

/// Python's identifier of the calling thread, as PyThread_get_thread_ident returns
/// it. A pthread_t is a number on Linux and a pointer on macOS: this cast takes
/// both.
inline uint64_t ThisThread() { return (uint64_t)pthread_self(); }

}  // namespace hostcall
