// Clocks.
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

/// The processor's own counter: half of that, for what is counted at each call.
/// It may stop or begin anew where a machine sleeps or moves, so it is for what
/// people are told; what the engine waits for is timed by NowNs.
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

/// How long a tick takes: measured once, from when the module was loaded until
/// somebody first asks, so that what is counted never seems to go back.
inline double TickNs() {
  static const double tick_ns = [] {
    const ClockPair now;
    const int64_t ticks = now.ticks - g_loaded.ticks;
    return ticks > 0 ? static_cast<double>(now.ns - g_loaded.ns) / ticks : 0.0;
  }();
  return tick_ns;
}

/// Seconds of counted ticks. A counter that went back counts as nothing.
inline double TicksToSeconds(int64_t ticks) {
  return ticks > 0 ? 1e-9 * TickNs() * static_cast<double>(ticks) : 0;
}

}  // namespace hostcall
