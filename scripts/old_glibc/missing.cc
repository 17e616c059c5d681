// What the compiler's libraries take from glibc and an old glibc does not have. The
// names stay inside the module, so that a newer glibc's own are left to others.
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define HOSTCALL_MISSING extern "C" __attribute__((visibility("hidden")))

/// 2.32. False is always right: reference counts are then changed atomically.
HOSTCALL_MISSING char __libc_single_threaded;
char __libc_single_threaded = 0;

/// 2.28. What fcntl is called after Python.h, which asks for offsets of 64 bits.
/// All offsets of these systems have 64.
HOSTCALL_MISSING int fcntl64(int descriptor, int command, ...) {
  va_list rest;
  va_start(rest, command);
  void* argument = va_arg(rest, void*);
  va_end(rest);
  return fcntl(descriptor, command, argument);
}

/// 2.30. Waits by the clock that may be set, as code for an older glibc does. Its
/// callers look at their own clock afterwards.
HOSTCALL_MISSING int pthread_cond_clockwait(pthread_cond_t* condition,
                                            pthread_mutex_t* mutex, clockid_t clock,
                                            const timespec* until) {
  timespec theirs, real;
  clock_gettime(clock, &theirs);
  clock_gettime(CLOCK_REALTIME, &real);
  real.tv_sec += until->tv_sec - theirs.tv_sec;
  real.tv_nsec += until->tv_nsec - theirs.tv_nsec;
  if (real.tv_nsec < 0) {
    real.tv_nsec += 1'000'000'000;
    --real.tv_sec;
  } else if (real.tv_nsec >= 1'000'000'000) {
    real.tv_nsec -= 1'000'000'000;
    ++real.tv_sec;
  }
  return pthread_cond_timedwait(condition, mutex, &real);
}

/// 2.36. For std::random_device.
HOSTCALL_MISSING uint32_t arc4random() {
  uint32_t bits;
  if (getentropy(&bits, sizeof(bits)) != 0) abort();
  return bits;
}
