// Which executions of a tap go through: before a byte is moved.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "base/clock.h"

namespace hostcall {

/// State of `every=` and `sample=` at one place of a program, for each device by
/// itself.
///
/// `every=n` has two users. One has a loop in the program, and wants steps 0, n, 2n
/// of each run of it; the other calls a program of one step again and again, and
/// wants one call in n. What sets them apart is whether a run comes here more than
/// n times:
///
///     until a run has, executions are counted together, over all runs;
///     from then on each run is counted by itself.
///
/// The first such run starts at 0 like all others, if it is the first of all. Where
/// runs overlap before one of them is known to be long, those that came later may
/// lack their step 0.
class Throttle {
 public:
  /// Null where all go through. `places`: of how many devices; more than that
  /// share.
  static std::unique_ptr<Throttle> For(int64_t steps, int64_t ns, double share,
                                       size_t places = 64) {
    if (steps <= 1 && ns <= 0 && share >= 1) return {};
    return std::unique_ptr<Throttle>(new Throttle(steps, ns, share, places));
  }

  /// `run` is XLA's number of the run, or the same for all where there is none.
  bool Lets(int device, int64_t run) {
    Place& place = places_[static_cast<unsigned>(device + 1) % places_.size()];
    if (steps_ > 1 && !Counts(place, run)) return false;
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
  /// A run that has come here, and how often.
  struct Run {
    int64_t seen = 0;
    int64_t last = 0;  ///< when, in executions of the place
  };
  /// Nothing tells when a run has ended. So this many are remembered at least; one
  /// that has not been here for as many others as that begins at 0 again.
  static constexpr size_t kRuns = 128;

  struct alignas(64) Place {
    // Held for some nanoseconds. Only threads that run the same program on the
    // same device share it, and most programs run on one thread at a time.
    std::mutex mutex;
    std::unordered_map<int64_t, Run> runs;
    int64_t newest_number = 0;
    Run* newest = nullptr;
    int64_t together = 0;  ///< executions of this place so far
    bool apart = false;    ///< a run has come here more than `every` times
    std::atomic<int64_t> next_ns{std::numeric_limits<int64_t>::min()};
    std::atomic<uint64_t> draws{0};
  };
  Throttle(int64_t steps, int64_t ns, double share, size_t places)
      : steps_(steps), ns_(ns), share_(share), places_(places) {}

  bool Counts(Place& place, int64_t number) const {
    std::lock_guard<std::mutex> lock(place.mutex);
    Run& run = RunOf(place, number);
    const int64_t before = run.seen++;
    run.last = place.together++;
    if (before == steps_) place.apart = true;
    return (place.apart ? before : run.last) % steps_ == 0;
  }

  static Run& RunOf(Place& place, int64_t number) {
    if (place.newest != nullptr && place.newest_number == number) {
      return *place.newest;
    }
    Run& run = place.runs[number];
    run.last = place.together;
    if (place.runs.size() > 2 * kRuns) Forget(place);
    place.newest_number = number;
    place.newest = &run;
    return run;
  }

  /// All but those that were here last.
  static void Forget(Place& place) {
    std::vector<int64_t> times;
    for (const auto& [number, run] : place.runs) times.push_back(run.last);
    const auto cut = times.end() - kRuns;
    std::nth_element(times.begin(), cut, times.end());
    for (auto it = place.runs.begin(); it != place.runs.end();) {
      it = it->second.last < *cut ? place.runs.erase(it) : std::next(it);
    }
  }

  /// splitmix64 over the number of the draw: the same choice in every run.
  bool Chosen(Place& place) const {
    uint64_t z = (place.draws.fetch_add(1, std::memory_order_relaxed) + 1) *
                 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    z ^= z >> 31;
    return static_cast<double>(z >> 11) * 0x1.0p-53 < share_;
  }

  const int64_t steps_, ns_;
  const double share_;
  std::vector<Place> places_;
};

}  // namespace hostcall
