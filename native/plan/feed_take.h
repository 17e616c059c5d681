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

/// Takes an item for a plan without rows, masks and small elements, if one is
/// ready: the common case. False: FeedTake does the rest.
inline bool TakeNow(const Plan& plan, int device, void* const* results) {
  if (!plan.grid.empty() || plan.packed || plan.masked) return false;
  const size_t lane = plan.feed->LaneOf(device);
  auto* const* targets = reinterpret_cast<char* const*>(results);
  if (!plan.feed->ring->TakeItem(lane, targets)) return false;
  *static_cast<bool*>(results[plan.results.size() - 1]) = true;
  plan.counters->native_calls.fetch_add(1, std::memory_order_relaxed);
  return true;
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
        ring_(*plan.feed->ring),
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
        switch (TakeOne(wait_ns)) {
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
  FeedRing::Took TakeOne(int64_t wait_ns) {
    char* const* targets = rows_.targets();
    const FeedRing::Took took = ring_.Take(lane_, targets, wait_ns);
    const size_t last = plan_.results.size() - 1;
    if (took == FeedRing::Took::kItem) {
      *reinterpret_cast<bool*>(targets[last]) = true;
      plan_.counters->native_calls.fetch_add(1, std::memory_order_relaxed);
    } else if (took == FeedRing::Took::kEnd) {
      for (size_t i = 0; i <= last; ++i) FillRow(plan_.results[i], targets[i]);
    }
    return took;
  }

  const Plan& plan_;
  FeedRing& ring_;
  const size_t lane_;
  HostView view_;
  Rows rows_;
  bool done_;
};

}  // namespace hostcall
