// Signals that arrive while no Python code runs.
//
// Python acts on a signal on its main thread, between two instructions. A main
// thread that waits in XLA for a program reaches no next instruction until the
// program ends. And Python gives SIGTERM no handler, so it ends the process at once
// and loses all queued taps. Therefore a signal also wakes a Python thread, the
// watcher (_runtime/watcher.py), which interrupts callbacks or delivers the taps.
//
// Python's handler for SIGINT comes back again and again: whoever calls
// signal.signal (asyncio.run, a notebook before each cell, pdb) installs it in
// place of ours, even if the Python function behind it stays the same, and says
// nothing. So ours is not installed once. Where a call begins (Keep) and ten times
// a second (Wait), the engine looks whether Python's handler stands there alone,
// and puts ours before it. What to do when the signal comes is decided then, by the
// Python function that stands there then.
//
// Guarantees
//   * A handler is installed for SIGINT only in place of Python's, which ours then
//     calls, and for SIGTERM only if it has the default action. A C library that
//     installs its own keeps it: it may call the one before it, so ours must not
//     call it.
//   * The handlers are async-signal-safe. They do a lock-free fetch_or and
//     post a semaphore; the one for SIGTERM writes the flight recorder, or raises
//     the signal again in a forked child, where the watcher does not exist. Nothing
//     that a handler uses is initialised in a handler.
//   * SIGTERM is caught once: a second one ends the process at once.
//   * Each event that is posted is returned by exactly one Wait. Events of the same
//     kind that are posted before that Wait count as one.
#pragma once

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>

#include "base/clock.h"
#include "base/flight_text.h"
#include "base/semaphore.h"

namespace hostcall {

/// Static: signal handlers and their state belong to the process.
class Signals {
 public:
  /// What the watcher is woken for; a bit each. Python sees them as
  /// `_native.Signal`.
  enum Event {
    kInterrupt = 1,   ///< SIGINT came
    kTerminate = 2,   ///< SIGTERM came
    kEnding = 4,      ///< the process began to end: watch for taps that hang
    kStop = 8,        ///< the watcher shall end
    kBury = 16,       ///< the graveyard has something to bury (slot_table.h)
    kUnwatched = 32,  ///< Python's handler for SIGINT stands without ours
  };

  /// Puts ours before Python's handler for SIGINT. To be called where Python has
  /// one, and with the GIL: signal.signal holds it too, so that a handler which it
  /// installs in between is not lost. Returns whether SIGINT is watched.
  static bool WatchInterrupt() {
    struct sigaction action;
    if (sigaction(SIGINT, nullptr, &action) != 0) return false;
    if (action.sa_handler == &OnInterrupt) return true;
    if (!IsUnwatched(action)) return false;
    g_pythons.store(action.sa_handler);  // before ours can run, which calls it
    action.sa_handler = &OnInterrupt;    // the mask and the flags stay
    return sigaction(SIGINT, &action, nullptr) == 0;
  }

  /// Does the same where a call begins, at most every 0.1 ms: asking the kernel
  /// takes as long as a small call. With the GIL.
  static void Keep(int64_t ticks) {
    static const auto pause =
        static_cast<int64_t>(TickNs() > 0 ? 1e5 / TickNs() : 0);
    // Relaxed: two threads that read an old time both ask, which does no harm.
    static std::atomic<int64_t> asked{0};
    const int64_t passed = ticks - asked.load(std::memory_order_relaxed);
    if (passed >= 0 && passed < pause) return;
    asked.store(ticks, std::memory_order_relaxed);
    if (g_pythons.load() != nullptr) WatchInterrupt();
  }

  /// Watches SIGTERM if it has the default action. Returns whether it is watched.
  static bool WatchTerminate() {
    struct sigaction installed;
    if (sigaction(SIGTERM, nullptr, &installed) != 0) return false;
    if ((installed.sa_flags & SA_SIGINFO) != 0 || installed.sa_handler != SIG_DFL) {
      return false;
    }
    g_watcher.store(getpid());
    struct sigaction action = {};
    action.sa_handler = &OnTerminate;
    action.sa_flags = static_cast<int>(SA_RESETHAND);
    return sigaction(SIGTERM, &action, nullptr) == 0;
  }

  /// Whether SIGTERM, if it is watched, writes the flight recorder to stderr.
  static void WriteFlightAtTerminate(bool on) {
    TickNs();  // its first call initialises
    g_writes_flight.store(on);
  }

  /// Wakes the watcher for these events. Async-signal-safe. The bits are set first:
  /// a Wait that the semaphore wakes finds them.
  static void Post(Event event) {
    g_pending.fetch_or(event, std::memory_order_release);
    g_posted.Post();
  }

  /// Returns the events that were posted since it last returned, waiting for one
  /// for at most `seconds`; 0 if none came. Only one thread waits, without the GIL.
  static Event Wait(double seconds) {
    const int64_t until = NowNs() + static_cast<int64_t>(1e9 * seconds);
    for (;;) {
      if (const Event events = TakePending()) return events;
      // The semaphore counts posts, of which one exchange may have taken several.
      // What it counts too much makes this loop look once more in vain.
      const double seconds_left = 1e-9 * static_cast<double>(until - NowNs());
      if (seconds_left <= 0) return TakePending();
      if (g_posted.Wait(seconds_left < kLookSeconds ? seconds_left : kLookSeconds))
        continue;
      struct sigaction action;
      if (sigaction(SIGINT, nullptr, &action) == 0 && IsUnwatched(action)) {
        return kUnwatched;
      }
    }
  }

 private:
  static Event TakePending() {
    return static_cast<Event>(g_pending.exchange(0, std::memory_order_acquire));
  }
  using Handler = void (*)(int);
  /// How often Wait looks at the handler of SIGINT.
  static constexpr double kLookSeconds = 0.1;

  /// Whether this action of SIGINT is Python's handler, as far as is known: before
  /// it was first seen, any plain handler may be.
  static bool IsUnwatched(const struct sigaction& action) {
    // With SA_SIGINFO the handler takes three arguments: ours could not call it.
    if ((action.sa_flags & SA_SIGINFO) != 0 || action.sa_handler == SIG_DFL ||
        action.sa_handler == SIG_IGN || action.sa_handler == &OnInterrupt) {
      return false;
    }
    const Handler pythons = g_pythons.load();
    return pythons == nullptr || pythons == action.sa_handler;
  }
  /// Wakes the watcher, and then runs Python's handler, which sets the flag for its
  /// main thread.
  static void OnInterrupt(int signal) {
    const int saved = errno;  // the interrupted code may be about to read it
    Post(kInterrupt);
    errno = saved;
    g_pythons.load()(signal);
  }
  /// Wakes the watcher, which delivers the taps and then sends SIGTERM again. By
  /// then the action is the default one, so the process ends.
  static void OnTerminate(int signal) {
    const int saved = errno;
    if (getpid() == g_watcher.load()) {
      // Here, not on the watcher, which needs the GIL: a process is often ended
      // because something holds the GIL and hangs. And before the watcher is woken,
      // which may end the process at once.
      if (g_writes_flight.load()) WriteFlight(STDERR_FILENO, "SIGTERM");
      Post(kTerminate);
    } else {
      // A forked child inherits the handler. SA_RESETHAND has restored the default
      // action, which ends the child as soon as this handler returns.
      raise(signal);
    }
    errno = saved;
  }
  // Orders. Post releases and Wait acquires: what a thread did before it posted
  // comes before what the watcher does about it, also if the watcher finds the bit
  // before the semaphore is posted. The others are set before the handlers that
  // read them are installed, by a system call, and have the default order.
  inline static Semaphore g_posted;  ///< one post for each call of Post
  /// The Event bits that Wait has not returned yet.
  inline static std::atomic<int> g_pending{0};
  inline static std::atomic<bool> g_writes_flight{
      false};  ///< WriteFlightAtTerminate's
  /// The process in which the watcher runs.
  inline static std::atomic<pid_t> g_watcher{0};
  /// Python's C handler, the same for all signals and for the life of the process;
  /// null before it was first seen. Set before our handler is installed.
  inline static std::atomic<Handler> g_pythons{nullptr};
};

}  // namespace hostcall
