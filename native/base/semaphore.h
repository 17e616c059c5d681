// A semaphore that a signal handler may post.
//
// Two kinds behind one name: POSIX has sem_t, but macOS implements neither sem_init
// nor sem_timedwait. Its own semaphores (Mach's) are posted by one system call,
// which a handler may make.
#pragma once

#if defined(__APPLE__)
#include <mach/mach.h>
#include <mach/semaphore.h>
#include <unistd.h>
#else
#include <semaphore.h>
#include <time.h>
#endif

#include <atomic>
#include <cerrno>
#include <cstdint>

#include "base/no_copy.h"

namespace hostcall {

#if defined(__APPLE__)

class Semaphore : NoCopy {
 public:
  Semaphore() { Make(); }

  /// Adds one. Async-signal-safe.
  void Post() {
    if (owner_.load() == getpid()) semaphore_signal(port_.load());
  }

  /// Takes one, waiting for at most `seconds`. False if none came; true may come in
  /// vain. One thread waits at a time.
  ///
  /// A forked child does not inherit the port, so it makes one of its own here. A
  /// Post that comes before is lost. Its caller set what it tells before it came
  /// here, so the look that follows a true finds that.
  bool Wait(double seconds) {
    if (owner_.load() != getpid()) {
      Make();
      return true;
    }
    const auto whole_seconds = static_cast<int64_t>(seconds);
    const mach_timespec_t most = {
        static_cast<unsigned int>(whole_seconds),
        static_cast<clock_res_t>((seconds - static_cast<double>(whole_seconds)) *
                                 1e9)};
    const kern_return_t code = semaphore_timedwait(port_.load(), most);
    if (code == KERN_OPERATION_TIMED_OUT) return false;
    // Without a port: the caller looks again and again, but not all the time.
    if (code != KERN_SUCCESS && code != KERN_ABORTED) usleep(10'000);
    return true;
  }

 private:
  void Make() {
    semaphore_t made = SEMAPHORE_NULL;
    semaphore_create(mach_task_self(), &made, SYNC_POLICY_FIFO, 0);
    port_.store(made);
    owner_.store(getpid());
  }
  // owner_ is written behind port_ and read before it, so a Post that finds the
  // owner finds its port. (Release and acquire would do.)
  std::atomic<semaphore_t> port_{SEMAPHORE_NULL};
  std::atomic<pid_t> owner_{0};  ///< the process whose port it is
};

#else

class Semaphore : NoCopy {
 public:
  Semaphore() { sem_init(&counts_, 0, 0); }

  /// Adds one. Async-signal-safe.
  void Post() { sem_post(&counts_); }

  /// Takes one, waiting for at most `seconds`. False if none came; true may come in
  /// vain, as when a signal interrupts the wait.
  bool Wait(double seconds) {
    timespec until;  // sem_timedwait knows only this clock, which may be set
    clock_gettime(CLOCK_REALTIME, &until);
    const auto whole_seconds = static_cast<int64_t>(seconds);
    until.tv_sec += static_cast<time_t>(whole_seconds);
    until.tv_nsec +=
        static_cast<long>((seconds - static_cast<double>(whole_seconds)) * 1e9);
    if (until.tv_nsec >= 1'000'000'000) {
      ++until.tv_sec;
      until.tv_nsec -= 1'000'000'000;
    }
    return sem_timedwait(&counts_, &until) == 0 || errno != ETIMEDOUT;
  }

 private:
  sem_t counts_;
};

#endif

}  // namespace hostcall
