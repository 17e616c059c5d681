// The items of a feed: pulled by its thread, taken by devices.
//
// Does not depend on Python (tests/native/feed_ring_test.cc).
//
// One thread, the producer, puts items into the ring. A sharded feed has a lane for
// each device of the process, and each device takes every item, its own block of
// it; any other feed has one lane. Lanes need not keep in step: an item stays until
// all have copied their part, and the fastest is at most `capacity` items ahead.
//
// Guarantees
//   * A lane takes each item once, in the order in which they were put.
//   * An item's memory is not written again before every lane has copied its part.
//   * Finish lets the lanes take what is there before they see the end; Close does
//     not.
//   * Close, Clear and Drop come after the same item for all lanes.
//
// The last point is what the line is for. Devices of one program meet in
// collectives, so if one fails before an item that another got, the other waits for
// ever; and if one gets the first item after a Clear where another got one before
// it, they go on with different items. So these three draw a line where the lane
// that is ahead is. Lanes behind it go on, as their items are still there; one at
// the line gets nothing. Clear and Drop wait until all are there, then level the
// lanes and take the line away. The lanes of a program that has failed never come,
// so the wait has a limit.
//
// One lock guards everything but the items' bytes; each side holds it for a few
// instructions, and never while it copies more than a few of them. Why the bytes
// need no lock:
//
//   1. producer: Reserve finds `put - freed < capacity`, under the lock
//   2. producer: writes the bytes of item `put`; no lane can reach that item yet
//   3. producer: Commit adds one to `put`, under the lock
//   4. lane: under the lock, takes the item's number, which is below `put`
//   5. lane: copies the bytes; the item is not freed, since this lane is missing
//   6. lane: under the lock, notes that it has copied. The last lane frees the item
//
// Clear and Drop change the numbers, so they also wait until nobody copies.
//
// A finer scheme (one atomic a side, as in a queue without locks) would save 20 ns
// of the 60 that an item costs beside its copy, but it could not have several
// takers of a lane: programs on two threads may use one feed.
#pragma once

#include <algorithm>
#include <cassert>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <mutex>
#include <new>
#include <stdexcept>
#include <vector>

#include "base/bytes.h"
#include "base/clock.h"
#include "base/layout.h"
#include "base/no_copy.h"

namespace hostcall {

class FeedRing : NoCopy {
 public:
  /// What a lane found.
  enum class Took {
    kItem,     ///< an item; it has been copied
    kNothing,  ///< no item yet
    kEnd,      ///< the items have ended, and lanes are told so
    kStopped,  ///< none comes any more, and Python says why
  };

  /// What has happened so far.
  struct Counts {
    int64_t taken = 0;     ///< items that all lanes have begun to copy, since Clear
    int64_t put = 0;       ///< items that the producer has put, since Clear
    int64_t total = 0;     ///< items that all lanes have taken, over all
    int64_t waits = 0;     ///< waits of devices for an item
    int64_t wait_ns = 0;   ///< how long these took
    int64_t stalls = 0;    ///< waits of the producer for space
    int64_t stall_ns = 0;  ///< how long these took
  };

  using Patience = std::chrono::nanoseconds;
  /// Far more than lanes of a program that runs need to meet.
  static constexpr Patience kPatience = std::chrono::seconds(10);

  /// `leaves` are the bytes of each leaf of one lane's part of an item; Clear and
  /// Drop wait for lanes for at most `patience`. Throws std::bad_alloc.
  FeedRing(std::vector<size_t> leaves, size_t lanes, size_t capacity,
           Patience patience = kPatience)
      : leaves_(std::move(leaves)),
        layout_(leaves_, kAlign),
        capacity_(capacity),
        patience_(patience),
        taken_(lanes, 0),
        ends_(lanes, 0) {
    if (lanes == 0 || capacity == 0) throw std::invalid_argument("an empty ring");
    memory_ = static_cast<char*>(
        ::operator new(std::max<size_t>(layout_.bytes * lanes * capacity, 1),
                       std::align_val_t{kAlign}));
    missing_.assign(capacity, 0);
  }
  ~FeedRing() { ::operator delete(memory_, std::align_val_t{kAlign}); }

  const std::vector<size_t>& leaves() const { return leaves_; }
  size_t lanes() const { return taken_.size(); }

  // --- The producer's side. Called by one thread.

  /// Waits for space for one more item. False if Wake or Close ended the wait.
  bool Reserve() {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto ready = [&] { return woken_ || closed_ || HasSpace(); };
    if (!ready()) {
      stalled_ = true;
      const int64_t start = NowNs();
      space_.wait(lock, ready);
      stalled_ = false;
      ++counts_.stalls;
      counts_.stall_ns += NowNs() - start;
    }
    return !TakeWake();
  }
  /// Where the leaf of a lane goes in the item that Reserve made space for.
  char* Target(size_t lane, size_t leaf) {
    // Only the producer changes put_, apart from Clear and Drop, which run when the
    // producer is in neither step.
    return Part(put_, lane) + layout_.offsets[leaf];
  }
  /// Hands the item to the lanes. False if the ring was closed meanwhile.
  bool Commit() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) return false;
    assert(HasSpace() && "Reserve made space, and only this thread takes it");
    missing_[put_ % capacity_] = lanes();
    ++put_;
    items_.notify_all();
    return true;
  }
  /// Waits until Wake or Close is called.
  void Idle() {
    std::unique_lock<std::mutex> lock(mutex_);
    space_.wait(lock, [&] { return woken_ || closed_; });
    TakeWake();
  }
  /// Says that no item follows those that are there: what lanes find behind them,
  /// kEnd or kStopped.
  void Finish(Took ending) {
    std::lock_guard<std::mutex> lock(mutex_);
    ending_ = ending;
    items_.notify_all();
  }
  /// Forgets all items and the end, and counts from zero again. Waits for lanes
  /// that are behind others. Does nothing after Close.
  void Clear() {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!AwaitLanes(lock)) return;
    std::fill(missing_.begin(), missing_.end(), 0);
    put_ = 0;
    freed_ = 0;
    Level(0);
  }
  /// Takes up to `n` items that no lane has taken, for all lanes, without copying,
  /// and forgets the end. Returns how many there were. Waits as Clear does.
  int64_t Drop(int64_t n) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!AwaitLanes(lock)) return 0;
    const int64_t from = *std::max_element(taken_.begin(), taken_.end());
    const int64_t dropped = std::min(n, put_ - from);
    while (freed_ < from + dropped) missing_[freed_++ % capacity_] = 0;
    Level(from + dropped);
    return dropped;
  }

  // --- Anybody's.

  /// Ends the producer's wait, or its next one.
  void Wake() {
    std::lock_guard<std::mutex> lock(mutex_);
    woken_ = true;
    space_.notify_all();
  }
  /// Ends everything, for ever. Lanes that are behind another still get the items
  /// that it got.
  void Close() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!closed_) DrawLine();
    closed_ = true;
    space_.notify_all();
    items_.notify_all();
    quiet_.notify_all();
  }

  // --- The lanes' side. Called by any thread.

  /// Takes an item and copies its leaves to `targets`, or takes notice of the end.
  /// Waits for one of them for at most `wait_ns`; 0 does not wait. Without targets,
  /// only says what it would find.
  Took Take(size_t lane, char* const* targets, int64_t wait_ns = 0) {
    std::unique_lock<std::mutex> lock(mutex_);
    Took took = Next(lane);
    if (took == Took::kNothing && wait_ns > 0) {
      items_.wait_for(lock, std::chrono::nanoseconds(wait_ns),
                      [&] { return (took = Next(lane)) != Took::kNothing; });
    }
    if (targets == nullptr) return took;
    if (took == Took::kItem) CopyNext(lane, targets, lock);
    if (took == Took::kEnd) {
      ++ends_[lane];
      if (quiet_wanted_) quiet_.notify_all();
    }
    return took;
  }
  /// Counts a wait of a device.
  void NoteWait(int64_t ns) {
    std::lock_guard<std::mutex> lock(mutex_);
    ++counts_.waits;
    counts_.wait_ns += ns;
  }
  Counts counts() const {
    std::lock_guard<std::mutex> lock(mutex_);
    Counts counts = counts_;
    counts.taken = *std::min_element(taken_.begin(), taken_.end());
    counts.put = put_;
    return counts;
  }

 private:
  static constexpr int64_t kNoLine = std::numeric_limits<int64_t>::max();
  static constexpr size_t kAlign = 64;  // a cache line, and JAX's own alignment

  bool HasSpace() const { return put_ - freed_ < static_cast<int64_t>(capacity_); }
  Took Next(size_t lane) const {
    if (At(lane) >= line_) return closed_ ? Took::kStopped : Took::kNothing;
    return taken_[lane] != put_ ? Took::kItem : ending_;
  }
  /// Items and ends that the lane has seen since Clear or Drop.
  int64_t At(size_t lane) const { return taken_[lane] + ends_[lane]; }
  void DrawLine() {
    line_ = 0;
    for (size_t lane = 0; lane < lanes(); ++lane) line_ = std::max(line_, At(lane));
  }
  bool AllAtTheLine() const {
    for (size_t lane = 0; lane < lanes(); ++lane) {
      if (At(lane) < line_) return false;
    }
    return true;
  }
  /// Copies the lane's next item, which is there. The lock is held, but not
  /// meanwhile.
  void CopyNext(size_t lane, char* const* targets,
                std::unique_lock<std::mutex>& lock) {
    const int64_t item = taken_[lane]++;
    const char* from = Part(item, lane);
    ++copying_;
    // Copying so little takes less time than giving the lock back and forth.
    const bool unlocks = layout_.bytes > 1024;
    if (unlocks) lock.unlock();
    for (size_t i = 0; i < leaves_.size(); ++i) {
      CopyBytes(targets[i], from + layout_.offsets[i], leaves_[i]);
    }
    if (unlocks) lock.lock();
    Copied(item);
  }
  char* Part(int64_t item, size_t lane) const {
    const size_t slot = static_cast<size_t>(item) % capacity_;
    return memory_ + layout_.bytes * (slot * lanes() + lane);
  }
  /// Whether somebody asked the producer to stop waiting; asks only once.
  bool TakeWake() {
    const bool woken = woken_ || closed_;
    woken_ = false;
    return woken;
  }
  /// A lane has copied its part. The lock is held.
  void Copied(int64_t item) {
    assert(copying_ > 0 && "the lane is one of those that copy");
    --copying_;
    size_t& missing = missing_[static_cast<size_t>(item) % capacity_];
    if (--missing == 0) {
      ++counts_.total;
      // Items are freed in order, though copies may end in any.
      while (freed_ < put_ &&
             missing_[static_cast<size_t>(freed_) % capacity_] == 0) {
        ++freed_;
      }
      // A producer that found the ring full is woken once for a quarter of it: a
      // wake-up costs more than a small item.
      const int64_t free = static_cast<int64_t>(capacity_) - (put_ - freed_);
      if (stalled_ && free * 4 >= static_cast<int64_t>(capacity_)) {
        stalled_ = false;
        space_.notify_all();
      }
    }
    if (copying_ == 0 && quiet_wanted_) quiet_.notify_all();
  }
  /// Waits until all lanes have seen as much, and nobody copies. No lane takes
  /// anything then until Level is called. False: the ring is closed.
  bool AwaitLanes(std::unique_lock<std::mutex>& lock) {
    if (closed_) return false;
    DrawLine();
    quiet_wanted_ = true;
    const bool met = quiet_.wait_for(lock, patience_, [&] {
      return closed_ || (copying_ == 0 && AllAtTheLine());
    });
    // Lanes that have not come by now belong to a program that has failed.
    if (!met) line_ = 0;
    quiet_.wait(lock, [&] { return closed_ || copying_ == 0; });
    quiet_wanted_ = false;
    return !closed_;
  }
  /// All lanes have taken `taken` items and no end, and go on from there.
  void Level(int64_t taken) {
    std::fill(taken_.begin(), taken_.end(), taken);
    std::fill(ends_.begin(), ends_.end(), 0);
    ending_ = Took::kNothing;
    line_ = kNoLine;
    items_.notify_all();  // lanes may have waited at the line
  }

  const std::vector<size_t> leaves_;
  const Layout layout_;  ///< of a lane's part of an item
  const size_t capacity_;
  const Patience patience_;
  char* memory_;  ///< capacity_ items of lanes() parts; owned

  mutable std::mutex mutex_;  ///< guards all below
  std::condition_variable items_, space_, quiet_;
  std::vector<int64_t> taken_;   ///< items that each lane has begun to copy
  std::vector<int64_t> ends_;    ///< how often each has seen the end
  int64_t line_ = kNoLine;       ///< lanes that have seen as much take nothing
  std::vector<size_t> missing_;  ///< lanes that have not copied the item of a slot
  int64_t put_ = 0;              ///< items that the producer has put
  int64_t freed_ = 0;            ///< items, from the first, that all have copied
  int64_t copying_ = 0;          ///< lanes that copy now
  bool quiet_wanted_ = false;    ///< Clear or Drop waits for them
  bool stalled_ = false;  ///< the producer found no space, and waits for some
  bool woken_ = false;    ///< Wake was called; TakeWake resets it
  bool closed_ = false;   ///< Close was called; never reset
  Took ending_ = Took::kNothing;  ///< what lanes find behind the items
  Counts counts_;
};

}  // namespace hostcall
