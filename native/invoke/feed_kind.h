// Feeds: the results are an item of a ring, and a bool that says whether there was
// one. The function is called only if none is ready: it gets the lane, and returns
// when there may be one, or raises.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <vector>

#include "plan/kind.h"
#include "queue/feed_ring.h"

namespace hostcall {

class FeedKind final : public Kind {
 public:
  FeedKind() { has_native_part = true; }

  std::shared_ptr<FeedRing> ring;  ///< never null in a plan
  /// For each lane, the ordinal of its device; empty: all devices use the one lane.
  std::vector<int> devices;

  size_t LaneOf(int device) const {
    const auto lane = std::find(devices.begin(), devices.end(), device);
    return lane == devices.end() ? 0 : static_cast<size_t>(lane - devices.begin());
  }

  std::unique_ptr<const Kind> For(const Plan& plan) const override;
  EventKind event() const override { return EventKind::kFeed; }
  bool RunNative(const Execution& execution,
                 std::unique_ptr<Progress>* progress) const override;
  bool Run(const Execution& execution, ActiveCall& call,
           Progress* progress) const override;
};

}  // namespace hostcall
