// One execution of a feed: an item for each row that wants one.
//
// Needs no GIL, except for the plan's death. Lives on the stack of the device's
// thread; if no item is ready, it remembers the row it came to, and goes on there.
#pragma once

#include <cstdint>

#include "base/clock.h"
#include "plan/rows.h"
#include "queue/feed_ring.h"

namespace hostcall {

/// Takes an item into a row of the results, or fills the row at the end. Waits for
/// one of them for at most `wait_ns`.
inline FeedRing::Took TakeItem(const Plan& plan, size_t lane, char* const* targets,
                               int64_t wait_ns) {
  const FeedRing::Took took = plan.feed->ring->Take(lane, targets, wait_ns);
  const size_t last = plan.results.size() - 1;
  if (took == FeedRing::Took::kItem) {
    *reinterpret_cast<bool*>(targets[last]) = true;
    plan.counters->native_calls.fetch_add(1, std::memory_order_relaxed);
  } else if (took == FeedRing::Took::kEnd) {
    for (size_t i = 0; i <= last; ++i) FillRow(plan.results[i], targets[i]);
  }
  return took;
}

/// Takes an item for a plan without rows, masks and small elements, if one is
/// ready: the common case. False: FeedTake does the rest.
inline bool TakeNow(const Plan& plan, int device, void* const* results) {
  if (!plan.grid.empty() || plan.packed || plan.masked) return false;
  const FeedRing::Took took = TakeItem(plan, plan.feed->LaneOf(device),
                                       reinterpret_cast<char* const*>(results), 0);
  return took == FeedRing::Took::kItem || took == FeedRing::Took::kEnd;
}

/// Counts a device's wait for the guard's life.
class FeedWait {
 public:
  explicit FeedWait(FeedRing& ring) : ring_(ring) {}
  ~FeedWait() { ring_.NoteWait(NowNs() - start_); }
  FeedWait(const FeedWait&) = delete;
  FeedWait& operator=(const FeedWait&) = delete;

 private:
  FeedRing& ring_;
  const int64_t start_ = NowNs();
};

class FeedTake {
 public:
  enum class Went {
    kDone,     ///< all rows have their items
    kWaits,    ///< a row found nothing
    kStopped,  ///< a row found that none will come, and Python says why
  };

  FeedTake(const Plan& plan, int device, const void* const* operands,
           void* const* results)
      : plan_(plan),
        lane_(plan.feed->LaneOf(device)),
        view_(plan, operands, results),
        rows_(plan, plan.masked ? static_cast<const bool*>(operands[0]) : nullptr,
              view_),
        done_(plan.rows == 0) {}

  size_t lane() const { return lane_; }
  const std::vector<int64_t>& row() const { return rows_.index(); }

  /// Goes on, and waits for at most `wait_ns` at the first row that finds nothing.
  Went Go(int64_t wait_ns) {
    while (!done_) {
      if (rows_.wanted()) {
        switch (TakeItem(plan_, lane_, rows_.targets(), wait_ns)) {
          case FeedRing::Took::kNothing:
            return Went::kWaits;
          case FeedRing::Took::kStopped:
            return Went::kStopped;
          default:
            break;
        }
      } else {
        // The count of masked rows is atomic (FillRow touches no Python).
        rows_.Fill();
      }
      done_ = !rows_.Next();
      if (done_) view_.Finish();
    }
    return Went::kDone;
  }

 private:
  const Plan& plan_;
  const size_t lane_;
  HostView view_;
  Rows rows_;
  bool done_;
};

}  // namespace hostcall
