// Layer A. Clocks.
#pragma once

#include <chrono>
#include <cstdint>

namespace hostcall {

/// Nanoseconds of a monotonic clock. Some 20 ns a reading.
inline int64_t NowNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

/// The processor's own counter: a third of that, for what is counted at each call.
/// Its unit is what TicksToNs says, and nothing but statistics depends on it.
inline int64_t Ticks() {
#if defined(__x86_64__)
  return static_cast<int64_t>(__builtin_ia32_rdtsc());
#elif defined(__aarch64__)
  int64_t ticks;
  asm volatile("mrs %0, cntvct_el0" : "=r"(ticks));
  return ticks;
#else
  return NowNs();
#endif
}

/// Both clocks at one moment.
struct ClockPair {
  int64_t ns = NowNs();
  int64_t ticks = Ticks();
};

/// When the module was loaded.
inline const ClockPair g_loaded;

/// The rate is measured once, from the load of the module to the first time that
/// somebody asks, which is long after.
inline double TicksToNs(int64_t ticks) {
  static const double rate = [] {
    ClockPair now;
    while (now.ns - g_loaded.ns < 1'000'000) now = ClockPair();
    return static_cast<double>(now.ns - g_loaded.ns) /
           static_cast<double>(now.ticks - g_loaded.ticks);
  }();
  return static_cast<double>(ticks) * rate;
}

}  // namespace hostcall
