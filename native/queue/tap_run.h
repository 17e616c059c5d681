// Runs: events of one tap, which its function gets together (hc.tap(batch=...)).
//
// Does not depend on Python (tests/native/tap_queue_test.cc).
#pragma once

#include <cstddef>

#include "queue/tap_lane.h"

namespace hostcall {

/// The first events of a batch, all of one owner.
struct TapRun {
  TapEvent* last;  ///< the youngest; the first one is the batch's
  size_t count;
};

/// Moves later events of the batch's first owner up, right behind the first one, so
/// that they are `most` together with it. Leaves events where they are that
/// `unwanted(event)` names. The events of the run keep their order, and so do the
/// others, whose first one is then the oldest of the batch that is not in the run.
///
/// Taps that alternate in a loop would otherwise make runs of one event each. The
/// search goes a few times as far as the run may be long, so that a rare tap
/// between many others costs each of those one look.
template <typename Unwanted>
TapRun GatherRun(TapBatch& batch, size_t most, Unwanted unwanted) {
  constexpr size_t kLooks = 4;
  TapRun run{batch.first, 1};
  TapEvent* before = batch.first;
  for (size_t looks = kLooks * most; looks != 0 && run.count < most; --looks) {
    TapEvent* event = before->next;
    if (event == nullptr) break;
    if (event->owner != batch.first->owner || unwanted(*event)) {
      before = event;
      continue;
    }
    if (before == run.last) {
      before = event;  // it is in its place already
    } else {
      before->next = event->next;
      if (batch.last == event) batch.last = before;
      event->next = run.last->next;
      run.last->next = event;
    }
    run.last = event;
    ++run.count;
  }
  return run;
}

}  // namespace hostcall
