// Decides which executions of a tap go through, before any byte is copied: `every=`
// and `sample=`.
//
// Does not depend on Python (tests/native/throttle_test.cc).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <vector>

#include "base/clock.h"
#include "base/no_copy.h"
#include "plan/run_counts.h"

namespace hostcall {

/// The state of `every=` and `sample=` at one place of a program, separate for each
/// device. Safe to use from several threads.
///
/// `every=n` has two kinds of users. One has a loop in the program, and wants steps
/// 0, n, 2n of each run. The other calls a program of one step again and again, and
/// wants one call in n. What distinguishes them is whether a run executes the tap
/// more than n times:
///
///   * until some run has, executions of all runs are counted together;
///   * from then on, the executions of each run are counted separately.
///
/// The first long run lets its step 0 through, as later runs do, if it is the first
/// run at all. If runs overlap before one of them is known to be long, the later
/// ones may miss their step 0.
class Throttle : NoCopy {
 public:
  /// Null if every execution goes through.
  static std::unique_ptr<Throttle> For(int64_t steps, int64_t ns, double share) {
    if (steps <= 1 && ns <= 0 && share >= 1) return {};
    return std::make_unique<Throttle>(steps, ns, share);
  }
  /// `places` is a number of devices; more devices than that share places.
  Throttle(int64_t steps, int64_t ns, double share, size_t places = 64)
      : steps_(steps), ns_(ns), share_(share), places_(places) {}

  /// Whether `Lets` needs the number of the run.
  bool counts() const { return steps_ > 1; }

  /// Whether this execution goes through. `run` is XLA's number of the run, or any
  /// constant if there is none.
  bool Lets(int device, int64_t run) {
    Place& place = places_[static_cast<unsigned>(device + 1) % places_.size()];
    if (steps_ > 1 && !Counts(place, run)) return false;
    if (share_ < 1 && !Chosen(place)) return false;
    if (ns_ <= 0) return true;
    // While less than half of the time has passed that the last reading of the
    // clock found to be left, it need not be read: the processor's counter tells
    // so in half the time. Its faults (clock.h) do little: if it goes backwards,
    // the clock is read, and if it has slowed down, an execution goes through
    // late. If two threads mix their readings, both still rest for half an
    // interval at most.
    const int64_t ticks = Ticks();
    const int64_t passed = ticks - place.looked.load(std::memory_order_relaxed);
    if (passed >= 0 && passed < place.rest.load(std::memory_order_relaxed)) {
      return false;
    }
    const int64_t now = NowNs();
    int64_t next = place.next_ns.load(std::memory_order_relaxed);
    if (now < next) {
      place.looked.store(ticks, std::memory_order_relaxed);
      const double tick_ns = TickNs();
      place.rest.store(
          tick_ns > 0 ? static_cast<int64_t>((next - now) / 2 / tick_ns) : 0,
          std::memory_order_relaxed);
      return false;
    }
    // If several threads come at the same moment, one wins.
    return place.next_ns.compare_exchange_strong(next, now + ns_,
                                                 std::memory_order_relaxed);
  }

 private:
  struct alignas(64) Place {
    // Guards the fields up to `apart`, for some nanoseconds. Its parties are
    // threads that run the same program on the same device, mostly one at a time.
    // The counts depend on each other, so atomics would not do.
    std::mutex mutex;
    RunCounts runs;
    int64_t together = 0;  ///< executions of this place so far
    bool apart = false;    ///< a run came here more than `every` times; never reset
    // Relaxed all: they are times and a number, and publish nothing.
    /// From when on the next execution may go through.
    std::atomic<int64_t> next_ns{std::numeric_limits<int64_t>::min()};
    std::atomic<int64_t> looked{0};  ///< in ticks: when the clock was read last
    std::atomic<int64_t> rest{0};    ///< in ticks: for how long it need not be read
    std::atomic<uint64_t> draws{0};  ///< decisions of `sample=` so far
  };

  /// Whether `every=` lets this execution through.
  bool Counts(Place& place, int64_t run) const {
    std::lock_guard<std::mutex> lock(place.mutex);
    const int64_t before = place.runs.Count(run);
    const int64_t together = place.together++;
    if (before == steps_) place.apart = true;
    return (place.apart ? before : together) % steps_ == 0;
  }

  /// Whether `sample=` lets this execution through: splitmix64 of the number of the
  /// decision, so that the choices are the same in every process.
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
