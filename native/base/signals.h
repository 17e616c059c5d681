// Signals that come while no Python code runs.
//
// Python acts on a signal on its main thread, between two instructions. A main
// thread that waits in XLA for a program comes to none before the program ends, and
// SIGTERM, to which Python gives no handler, ends the process where it stands, with
// all that taps have queued. So a signal also wakes a thread of Python's
// (_watcher.py), which does what is to be done.
//
// Guarantees
//   * A handler of ours is only put where SIGINT has one (which it calls) and
//     where SIGTERM has the default action.
//   * It does what a signal handler may: a lock-free exchange, sem_post, and in a
//     forked child (whose watcher does not exist) the default action.
//   * SIGTERM is caught once: the second ends the process at once.
//   * Wait returns everything that was posted since it returned last, once.
#pragma once

#include <semaphore.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>

namespace hostcall {

class Signals {
 public:
  enum Event { kInterrupt = 1, kTerminate = 2, kEnding = 4, kStop = 8, kBury = 16 };

  /// Watches SIGINT, where it has a handler. True: it is watched.
  static bool WatchInterrupt() {
    Posted();  // made before a handler asks for it
    struct sigaction& before = Before();
    if (before.sa_handler != nullptr) return true;  // by an earlier call
    struct sigaction found;
    if (sigaction(SIGINT, nullptr, &found) != 0) return false;
    if ((found.sa_flags & SA_SIGINFO) != 0 || found.sa_handler == SIG_DFL ||
        found.sa_handler == SIG_IGN) {
      return false;
    }
    before = found;
    struct sigaction ours = found;
    ours.sa_handler = &OnInterrupt;
    return sigaction(SIGINT, &ours, nullptr) == 0;
  }

  /// Watches SIGTERM, where it has the default action. True: it is watched.
  static bool WatchTerminate() {
    struct sigaction found;
    if (sigaction(SIGTERM, nullptr, &found) != 0) return false;
    if ((found.sa_flags & SA_SIGINFO) != 0 || found.sa_handler != SIG_DFL) {
      return false;
    }
    Posted();
    Watcher().store(getpid());
    struct sigaction ours = {};
    ours.sa_handler = &OnTerminate;
    ours.sa_flags = static_cast<int>(SA_RESETHAND);
    return sigaction(SIGTERM, &ours, nullptr) == 0;
  }

  static void Post(int event) {
    Pending().fetch_or(event);
    sem_post(&Posted());
  }

  /// The events since the last return, none after so many seconds. The GIL is not
  /// held. One thread waits.
  static int Wait(double seconds) {
    timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    const auto whole = static_cast<int64_t>(seconds);
    until.tv_sec += static_cast<time_t>(whole);
    until.tv_nsec +=
        static_cast<long>((seconds - static_cast<double>(whole)) * 1e9);
    if (until.tv_nsec >= 1'000'000'000) {
      ++until.tv_sec;
      until.tv_nsec -= 1'000'000'000;
    }
    for (;;) {
      if (const int events = Pending().exchange(0)) return events;
      if (sem_timedwait(&Posted(), &until) != 0 && errno == ETIMEDOUT) {
        return Pending().exchange(0);
      }
    }
  }

 private:
  static void OnInterrupt(int signal) {
    const int saved = errno;
    Post(kInterrupt);
    errno = saved;
    Before().sa_handler(signal);
  }
  static void OnTerminate(int signal) {
    const int saved = errno;
    if (getpid() == Watcher().load()) {
      Post(kTerminate);
    } else {
      raise(signal);  // the action is the default again
    }
    errno = saved;
  }
  static sem_t& Posted() {
    static sem_t* posted = [] {
      static sem_t made;
      sem_init(&made, 0, 0);
      return &made;
    }();
    return *posted;
  }
  static std::atomic<int>& Pending() {
    static std::atomic<int> pending{0};
    return pending;
  }
  static std::atomic<pid_t>& Watcher() {
    static std::atomic<pid_t> watcher{0};
    return watcher;
  }
  static struct sigaction& Before() {
    static struct sigaction before = {};
    return before;
  }
};

}  // namespace hostcall
