// Writes the flight recorder when the process dies of a signal.
//
// Only on request (hc.configure(flight="signals")): handlers of these signals
// belong to the program, and a library should not take them unasked.
//
// Guarantees
//   * The handler that was there before (faulthandler's, a debugger's) runs
//     afterwards, with the arguments that the kernel gave. If there was none, the
//     signal takes its default action, so the process dies of the same signal and
//     leaves the same core.
//   * The handler is async-signal-safe (flight_text.h). It runs on the alternative
//     stack if the thread has one, as faulthandler gives to the main thread.
//   * The text is written once, even if several threads die at the same time.
#pragma once

#include <signal.h>

#include <atomic>
#include <cstddef>
#include <mutex>

#include "base/flight_text.h"
#include "base/free_threads.h"

namespace hostcall {

/// Static: signal handlers belong to the process.
class FatalSignals {
 public:
  /// Installs the handlers, or restores those before.
  static void Watch(bool on) {
    static AttachedMutex mutex;
    const std::lock_guard<AttachedMutex> lock(mutex);
    TickNs();  // its first call initialises, which a handler must not do
    for (size_t i = 0; i < kCount; ++i) {
      struct sigaction installed;
      if (sigaction(kSignals[i], nullptr, &installed) != 0) continue;
      const bool is_ours = (installed.sa_flags & SA_SIGINFO) != 0 &&
                           installed.sa_sigaction == &OnFatal;
      if (!on) {
        if (is_ours) sigaction(kSignals[i], &g_before[i], nullptr);
        g_installed[i] = g_installed[i] && !is_ours;
        continue;
      }
      // A handler that was installed after ours may call ours. If ours then called
      // that one again, the two would do so for ever.
      if (g_installed[i]) continue;
      g_installed[i] = true;
      g_before[i] = installed;  // before our handler can run, which reads it
      struct sigaction handler = {};
      handler.sa_sigaction = &OnFatal;
      handler.sa_flags = SA_SIGINFO | SA_ONSTACK;
      sigaction(kSignals[i], &handler, nullptr);
    }
  }

 private:
  static constexpr size_t kCount = 5;
  static constexpr int kSignals[kCount] = {SIGSEGV, SIGABRT, SIGBUS, SIGFPE,
                                           SIGILL};
  static constexpr const char* kNames[kCount] = {"SIGSEGV", "SIGABRT", "SIGBUS",
                                                 "SIGFPE", "SIGILL"};

  static void OnFatal(int signal, siginfo_t* info, void* context) {
    // Of several threads, the first. Which one that is needs no order.
    static std::atomic<bool> is_written{false}, entered[kCount]{};
    size_t i = 0;
    while (i < kCount - 1 && kSignals[i] != signal) ++i;
    if (!is_written.exchange(true, std::memory_order_relaxed))
      WriteFlight(STDERR_FILENO, kNames[i]);
    const struct sigaction& before = g_before[i];
    // The handler from before is called once, since it may send the signal again.
    const bool again = entered[i].exchange(true, std::memory_order_relaxed);
    if (!again && (before.sa_flags & SA_SIGINFO) != 0) {
      before.sa_sigaction(signal, info, context);
    } else if (!again && before.sa_handler != SIG_DFL &&
               before.sa_handler != SIG_IGN) {
      before.sa_handler(signal);
    } else {
      // A fault happens again when this returns, and then takes the default action.
      // A signal that was sent does not, so it is sent again; it is blocked until
      // this returns. (An ignored fault would come back for ever.)
      struct sigaction plain = {};
      plain.sa_handler = SIG_DFL;
      sigaction(signal, &plain, nullptr);
      if (info == nullptr || info->si_code <= 0) raise(signal);
    }
  }
  /// The actions before ours, as in kSignals.
  inline static struct sigaction g_before[kCount] = {};
  inline static bool g_installed[kCount] = {};  ///< ours, or one that may call ours
};

}  // namespace hostcall
