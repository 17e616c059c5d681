// How often each run of a program has come to one of its places.
//
// Does not depend on Python (tests/native/throttle_test.cc).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

namespace hostcall {

/// The owner has a lock around it.
///
/// XLA does not say when a run has ended, so old ones are forgotten: one that comes
/// back after kRuns others begins at 0 again.
class RunCounts {
 public:
  /// Counts an execution of the run with this number; returns how many there were
  /// before.
  int64_t Count(int64_t run) {
    // A loop comes here again and again: it needs no look-up.
    if (newest_.first != run) {
      const auto remembered =
          std::find_if(others_.begin(), others_.end(),
                       [run](const auto& other) { return other.first == run; });
      const int64_t executions =
          remembered == others_.end() ? 0 : remembered->second;
      if (remembered != others_.end()) others_.erase(remembered);
      if (newest_.second > 0) others_.push_back(newest_);
      if (others_.size() > kRuns) others_.erase(others_.begin());
      newest_ = {run, executions};
    }
    return newest_.second++;
  }

 private:
  /// Runs that are remembered besides the newest.
  static constexpr size_t kRuns = 128;
  using Run = std::pair<int64_t, int64_t>;  ///< its number, its executions so far

  Run newest_{-1, 0};        ///< the run that came last
  std::vector<Run> others_;  ///< the one that came least recently first
};

/// The same for each device. Safe to use from several threads. A call without the
/// GIL: it takes a lock.
class DeviceRunCounts {
 public:
  /// `places` is a number of devices; more devices than that share places.
  explicit DeviceRunCounts(size_t places = 64) : places_(places) {}

  /// As RunCounts::Count, of one device.
  int64_t Count(int device, int64_t run) {
    Place& place = places_[static_cast<unsigned>(device + 1) % places_.size()];
    std::lock_guard<std::mutex> lock(place.mutex);
    return place.runs.Count(run);
  }

 private:
  struct alignas(64) Place {
    std::mutex mutex;  ///< guards `runs`
    RunCounts runs;
  };
  std::vector<Place> places_;
};

}  // namespace hostcall
