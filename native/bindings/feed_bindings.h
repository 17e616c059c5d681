// Python's side of the rings of feeds.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <vector>

#include "queue/feed_ring.h"

namespace hostcall {

/// Python's reference to a ring. Plans have their own, so a ring lives as long as a
/// program may take from it.
struct FeedHandle {
  std::shared_ptr<FeedRing> ring;
};

/// The fields of a FeedSettings that Python gives (plan/plan.h).
struct FeedSpec {
  FeedHandle ring;
  std::vector<int> devices;
};

void InitFeeds(nanobind::module_& m);

}  // namespace hostcall
