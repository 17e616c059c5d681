// The two clocks of the engine: one that is exact, one that is cheap.
#pragma once

#include <chrono>
#include <cstdint>

namespace hostcall {

/// Nanoseconds of a monotonic clock. A reading takes about 20 ns.
inline int64_t NowNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

/// The processor's own counter, which takes half as long to read. Used for the
/// statistics of each call. It may stop or restart when a machine sleeps or a
/// virtual machine moves, so nothing waits by it: timeouts and limits use NowNs. A
/// throttle looks at it to see that reading the clock can wait.
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

/// Both clocks when the module was loaded.
inline const ClockPair g_loaded;

/// Nanoseconds a tick, averaged from the loading of the module to the first call of
/// this function. Measured only once: with a new value for each reading, a time
/// that was reported before could seem to shrink.
inline double TickNs() {
  static const double tick_ns = [] {
    const ClockPair now;
    const int64_t ticks = now.ticks - g_loaded.ticks;
    return ticks > 0 ? static_cast<double>(now.ns - g_loaded.ns) / ticks : 0.0;
  }();
  return tick_ns;
}

/// Seconds for a number of ticks; 0 if the counter went backwards in between.
inline double TicksToSeconds(int64_t ticks) {
  return ticks > 0 ? 1e-9 * TickNs() * static_cast<double>(ticks) : 0;
}

}  // namespace hostcall
