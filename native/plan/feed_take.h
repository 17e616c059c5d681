// One execution of a feed: an item for each row that wants one.
//
// Needs no GIL, except for the plan's death. Lives on the stack of the device's
// thread; if no item is ready, it remembers the row it came to, and goes on there.
#pragma once

#include <cstdint>

#include "base/clock.h"
#include "base/no_copy.h"
#include "plan/rows.h"
#include "queue/feed_ring.h"

namespace hostcall {

/// Takes an item into a row of the results, or fills the row at the end. Waits for
/// one of them for at most `wait_ns`; false if neither comes.
inline bool TakeItem(const Plan& plan, size_t lane, char* const* targets,
                     int64_t wait_ns) {
  const FeedRing::Took took = plan.feed->ring->Take(lane, targets, wait_ns);
  const size_t last = plan.results.size() - 1;
  if (took == FeedRing::Took::kItem) {
    *reinterpret_cast<bool*>(targets[last]) = true;
    plan.counters->native_calls.fetch_add(1, std::memory_order_relaxed);
  } else if (took == FeedRing::Took::kEnd) {
    for (size_t i = 0; i <= last; ++i) FillRow(plan.results[i], targets[i]);
  }
  return took == FeedRing::Took::kItem || took == FeedRing::Took::kEnd;
}

/// Takes an item for a plan without rows, masks and small elements, if one is
/// ready: the common case. False: FeedTake does the rest.
inline bool TakeNow(const Plan& plan, int device, void* const* results) {
  if (!plan.grid.empty() || plan.packed || plan.masked) return false;
  return TakeItem(plan, plan.feed->LaneOf(device),
                  reinterpret_cast<char* const*>(results), 0);
}

class FeedTake : NoCopy {
 public:
  FeedTake(const Plan& plan, int device, const void* const* operands,
           void* const* results)
      : plan_(plan),
        lane_(plan.feed->LaneOf(device)),
        rows_(plan, operands, results),
        done_(plan.rows == 0) {}
  /// Counts the wait, if a row found nothing. Takes the ring's lock: the caller
  /// does not hold the GIL.
  ~FeedTake() {
    if (waits_since_ != 0) plan_.feed->ring->NoteWait(NowNs() - waits_since_);
  }

  size_t lane() const { return lane_; }
  const std::vector<int64_t>& row() const { return rows_.index(); }

  /// Goes on, and waits for at most `wait_ns` at the first row that finds nothing.
  /// Whether all rows have their items; if not, none is there now, or none will
  /// come, and Python says why.
  bool Go(int64_t wait_ns) {
    while (!done_) {
      if (!rows_.wanted()) {
        // The count of masked rows is atomic (FillRow touches no Python).
        rows_.Fill();
      } else if (!TakeItem(plan_, lane_, rows_.targets(), wait_ns)) {
        if (waits_since_ == 0) waits_since_ = NowNs();
        return false;
      }
      done_ = !rows_.Next();
      if (done_) rows_.Finish();
    }
    return true;
  }

 private:
  const Plan& plan_;
  const size_t lane_;
  Rows rows_;
  bool done_;
  int64_t waits_since_ = 0;  ///< when a row first found nothing (NowNs); else 0
};

}  // namespace hostcall
