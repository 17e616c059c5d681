// Layer E. Ctrl-C while the main thread waits inside JAX.
//
// Python acts on a signal on its main thread, between two instructions. A main
// thread that waits in XLA for a program, whose callback runs on a thread of XLA's,
// comes to no instruction before the program ends. So a signal also wakes a watcher
// (see _interrupt.py), which raises KeyboardInterrupt in those callbacks; their
// program fails, and the main thread comes back.
#pragma once

#include <semaphore.h>
#include <signal.h>

namespace hostcall {

/// Puts a handler before the one that SIGINT has, and which it calls. What it does
/// besides is allowed in a signal handler: sem_post.
class InterruptWatch {
 public:
  static bool Install() {
    static const bool installed = [] {
      if (sem_init(&Posted(), 0, 0) != 0) return false;
      if (sigaction(SIGINT, nullptr, &Before()) != 0) return false;
      if ((Before().sa_flags & SA_SIGINFO) != 0 || Before().sa_handler == SIG_DFL ||
          Before().sa_handler == SIG_IGN) {
        return false;
      }
      struct sigaction ours = Before();
      ours.sa_handler = &Handle;
      return sigaction(SIGINT, &ours, nullptr) == 0;
    }();
    return installed;
  }
  /// Blocks until a SIGINT has come since the last return. The GIL is not held.
  static void Wait() {
    while (sem_wait(&Posted()) != 0) {
    }
  }

 private:
  static void Handle(int signal) {
    sem_post(&Posted());
    Before().sa_handler(signal);
  }
  static sem_t& Posted() {
    static sem_t posted;
    return posted;
  }
  static struct sigaction& Before() {
    static struct sigaction before;
    return before;
  }
};

}  // namespace hostcall
