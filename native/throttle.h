// Layer C. Which executions of a tap go through: before a byte is moved.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>

#include "guards.h"
#include "plan.h"

namespace hostcall {

/// State of `every=` and `sample=` at one place of a program, for each device by
/// itself. A device comes to a place once at a time in most programs; where it does
/// not (one program, two runs at once) the exchange lets one of them through.
class Throttle {
 public:
  static std::unique_ptr<Throttle> For(const TapSettings& tap) {
    if (tap.every_steps <= 1 && tap.every_ns <= 0 && tap.sample >= 1) return {};
    return std::unique_ptr<Throttle>(new Throttle(tap));
  }

  bool Lets(int device) {
    Place& place = places_[static_cast<unsigned>(device + 1) % kPlaces];
    if (steps_ > 1 && place.step.fetch_add(1, std::memory_order_relaxed) % steps_) {
      return false;
    }
    if (share_ < 1 && !Chosen(place)) return false;
    if (ns_ > 0) {
      const int64_t now = NowNs();
      int64_t next = place.next_ns.load(std::memory_order_relaxed);
      if (now < next) return false;
      return place.next_ns.compare_exchange_strong(next, now + ns_,
                                                   std::memory_order_relaxed);
    }
    return true;
  }

 private:
  struct alignas(64) Place {
    std::atomic<int64_t> step{0};
    std::atomic<int64_t> next_ns{std::numeric_limits<int64_t>::min()};
    std::atomic<uint64_t> draws{0};
  };
  explicit Throttle(const TapSettings& tap)
      : steps_(tap.every_steps), ns_(tap.every_ns), share_(tap.sample) {}

  /// splitmix64 over the number of the draw: the same choice in every run.
  bool Chosen(Place& place) const {
    uint64_t z = (place.draws.fetch_add(1, std::memory_order_relaxed) + 1) *
                 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    z ^= z >> 31;
    return static_cast<double>(z >> 11) * 0x1.0p-53 < share_;
  }

  static constexpr int kPlaces = 64;  // more devices than that share
  const int64_t steps_, ns_;
  const double share_;
  Place places_[kPlaces];
};

}  // namespace hostcall
