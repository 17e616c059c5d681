#include "invoke/feed_kind.h"

#include <cassert>
#include <cstdint>
#include <stdexcept>

#include "base/clock.h"
#include "base/no_copy.h"
#include "plan/call_scope.h"
#include "plan/rows.h"

namespace hostcall {
namespace {

/// How long a device waits for an item before it enters Python, where the wait is
/// seen by hc.monitor.status(), and ends by Ctrl-C and by timeout=. A wait within
/// this time costs no Python.
constexpr int64_t kPatienceNs = 10'000'000;

/// Takes an item into a row of the results, or fills the row at the end. Waits for
/// one of them for at most `wait_ns`; false if neither comes.
bool TakeItem(const Plan& plan, FeedRing& ring, size_t lane, char* const* targets,
              int64_t wait_ns) {
  const FeedRing::Took took = ring.Take(lane, targets, wait_ns);
  const size_t last = plan.results.size() - 1;
  if (took == FeedRing::Took::kItem) {
    *reinterpret_cast<bool*>(targets[last]) = true;
    plan.counters->native_calls.fetch_add(1, std::memory_order_relaxed);
  } else if (took == FeedRing::Took::kEnd) {
    for (size_t i = 0; i <= last; ++i) FillRow(plan.results[i], targets[i]);
  }
  return took == FeedRing::Took::kItem || took == FeedRing::Took::kEnd;
}

/// One execution of a feed: an item for each row that wants one. If none is ready,
/// it remembers the row it came to, and goes on there. Needs no GIL, except for the
/// plan's death.
class FeedTake final : public Progress, NoCopy {
 public:
  FeedTake(const FeedKind& feed, const Execution& execution)
      : plan_(execution.plan),
        ring_(*feed.ring),
        lane_(feed.LaneOf(execution.device)),
        rows_(plan_, execution.operands, execution.results),
        done_(plan_.rows == 0) {}
  /// Counts the wait, if a row found nothing. Takes the ring's lock: the caller
  /// does not hold the GIL.
  ~FeedTake() override {
    if (waits_since_ != 0) ring_.NoteWait(NowNs() - waits_since_);
  }

  size_t lane() const { return lane_; }
  const std::vector<int64_t>& row() const { return rows_.index(); }

  bool Wait() override { return Go(kPatienceNs); }
  /// Goes on, and waits for at most `wait_ns` at the first row that finds nothing.
  /// Whether all rows have their items; if not, none is there now, or none will
  /// come, and Python says why.
  bool Go(int64_t wait_ns) {
    while (!done_) {
      if (!rows_.is_wanted()) {
        // The count of masked rows is atomic (FillRow touches no Python).
        rows_.Fill();
      } else if (!TakeItem(plan_, ring_, lane_, rows_.targets(), wait_ns)) {
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
  FeedRing& ring_;  ///< the plan's kind owns it
  const size_t lane_;
  Rows rows_;
  bool done_;
  int64_t waits_since_ = 0;  ///< when a row first found nothing (NowNs); else 0
};

}  // namespace

std::unique_ptr<const Kind> FeedKind::For(const Plan&) const {
  if (!ring) throw std::invalid_argument("a feed has no ring");
  return std::make_unique<FeedKind>(*this);
}

bool FeedKind::RunNative(const Execution& execution,
                         std::unique_ptr<Progress>* progress) const {
  const Plan& plan = execution.plan;
  // The common case, which allocates nothing: no rows, masks or packed elements,
  // and an item is ready.
  if (plan.grid.empty() && !plan.packed && !plan.masked &&
      TakeItem(plan, *ring, LaneOf(execution.device),
               reinterpret_cast<char* const*>(execution.results), 0)) {
    return true;
  }
  auto take = std::make_unique<FeedTake>(*this, execution);
  if (take->Go(0)) return true;
  *progress = std::move(take);
  return false;
}

bool FeedKind::Run(const Execution& execution, ActiveCall& call,
                   Progress* progress) const {
  assert(progress != nullptr && "RunNative comes first, and leaves the take");
  auto& take = static_cast<FeedTake&>(*progress);
  for (;;) {
    {
      GilRelease unlocked;  // an item's bytes are copied in there
      if (take.Go(0)) return true;
    }
    const Ref lane = Ref::Steal(PyLong_FromSize_t(take.lane()));
    if (!Call(execution.plan.function.get(), lane)) {
      call.FailedAt(take.row());
      return false;
    }
  }
}

}  // namespace hostcall
