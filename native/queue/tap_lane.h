// The queued taps of one device, oldest first. (If there are more devices than
// lanes, a few devices share one.)
//
// Does not depend on Python (tests/native/tap_queue_test.cc).
//
// Guarantees
//   * First in, first out.
//   * One lock, which a push takes once, and the worker a few times a batch. The
//     time under it does not grow with the length of the queue, except where events
//     have to be looked at one by one (several lanes are at work, or drop_oldest),
//     and there a constant bounds it. A payload is copied under it only up to
//     kOwnBlock.
//   * A program may be dropped while its events are on the way: each event retains
//     its owner from the push until its delivery or its drop.
//
// Life of an event
//   1. a device writes it (Store) and links it at the tail
//   2. the worker unlinks a batch from the head (Take); from here on only the
//      worker touches these events, and it reads and delivers them without the lock
//   3. the worker forgets them (Finish), or puts the rest of a slow batch back at
//      the head (GiveBack), where drop_oldest can reach them again
//
// Memory. It is recycled, so that the steady state allocates nothing. A small event
// lies in the lane's open slab, behind the one before it; a large one has a slab of
// its own. A slab goes back to the pool when its last event is done and the lane
// adds no more to it. An event never moves.
#pragma once

#include <atomic>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <mutex>
#include <new>
#include <type_traits>
#include <vector>

#include "base/slot_table.h"

namespace hostcall {

/// The free slabs of all lanes. Never destroyed. Safe to use from several threads.
class SlabPool {
 public:
  static constexpr size_t kSlabBytes = size_t{1} << 18;

  /// Header of a slab; its data follows in the same allocation. While a slab is out
  /// of the pool, its fields belong to the lane that took it and are guarded by
  /// that lane's lock.
  struct Slab {
    size_t capacity;      ///< bytes of data; never changes
    size_t used = 0;      ///< bytes handed to events so far
    int64_t live = 0;     ///< events in it that are not done yet
    bool filling = true;  ///< whether its lane may add more events
    char* data() { return reinterpret_cast<char*>(this) + kHeader; }
  };

  /// Returns a slab of at least `bytes`; the caller owns it until Give. Throws
  /// std::bad_alloc.
  Slab* Take(size_t bytes) {
    // A recycled slab has to match the capacity exactly, so capacities are few:
    // they grow in steps of 64 KiB, and above 1 MiB in steps of a sixteenth to an
    // eighth of the size. Values of about one size then share slabs.
    size_t step = kSlabBytes / 4;
    while (step * 16 < bytes) step *= 2;
    const size_t capacity = (bytes + step - 1) / step * step;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      // From the back: the slab that came back last is most likely still in a
      // cache.
      for (size_t i = free_.size(); i-- > 0;) {
        if (free_[i]->capacity != capacity) continue;
        Slab* slab = free_[i];
        free_.erase(free_.begin() + static_cast<std::ptrdiff_t>(i));
        cached_ -= capacity;
        slab->used = 0;
        slab->filling = true;
        return slab;
      }
    }
    // The system allocator may be slow, so it is called without the lock.
    void* memory = std::aligned_alloc(kHeader, capacity + kHeader);
    if (memory == nullptr) throw std::bad_alloc();
    Slab* slab = new (memory) Slab;
    slab->capacity = capacity;
    return slab;
  }

  /// Takes back a slab without live events: keeps it for the next Take if the cache
  /// has room, else frees it.
  void Give(Slab* slab) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (cached_ + slab->capacity <= most_cached_) {
      free_.push_back(slab);
      cached_ += slab->capacity;
      return;
    }
    lock.unlock();
    std::free(slab);
  }

  /// Bounds the bytes that the pool keeps for reuse. Frees cached slabs above that,
  /// the newest first.
  void set_most_cached(size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    most_cached_ = bytes;
    while (cached_ > bytes) {
      cached_ -= free_.back()->capacity;
      std::free(free_.back());
      free_.pop_back();
    }
  }

 private:
  /// A cache line, so that the data is aligned to one as well.
  static constexpr size_t kHeader = 64;
  static_assert(sizeof(Slab) <= kHeader, "the data starts behind the header");
  static_assert(std::is_trivially_destructible_v<Slab>, "it is only freed");

  // Guards the fields below. Devices take it when a push needs a new slab, the
  // worker when it returns one. Both may hold the lock of a lane meanwhile, so
  // nothing under this lock may lock a lane. A lock for each lane would gain
  // nothing: one slab holds up to 4096 scalars, so thousands of pushes take this
  // lock once.
  std::mutex mutex_;
  std::vector<Slab*> free_;  ///< slabs ready for Take, the last returned at the end
  size_t cached_ = 0;        ///< bytes of data in free_
  size_t most_cached_ = size_t{128} << 20;  ///< bound on cached_
};

/// Taps that were not delivered, by the reason. Devices and the worker add to them
/// without a lock. Relaxed: each is exact by itself, and publishes nothing.
struct TapCounts {
  std::atomic<int64_t> dropped{0};  ///< the queue was full
  std::atomic<int64_t> masked{0};   ///< `where` was False
  std::atomic<int64_t> skipped{0};  ///< `every` or `sample` left them out
  std::atomic<int64_t> waited{0};   ///< ticks that devices waited for space
};

/// What an event belongs to: the plan of its tap, or an object of a test.
class TapOwner : public RefCounted {
 public:
  TapCounts* counts = nullptr;  ///< lives as long as the owner; not owned
};

/// A queued tap: this header, and the operands right behind it. The header has 48
/// bytes so that a scalar's event fills exactly one cache line, which is all that
/// the device's core and the worker's core have to hand over.
struct TapEvent {
  TapEvent* next;        ///< the next younger event; null at the tail
  SlabPool::Slab* slab;  ///< where the event lies
  TapOwner* owner;       ///< retained; dangling once Finish has released it
  int64_t sequence;      ///< position among all events of the process
  int64_t run;           ///< XLA's number of the execution; -1 for an eager tap
  uint32_t lines;        ///< size with the header, in units of kLine
  int16_t device;        ///< ordinal; -1 for an eager tap
  bool droppable;        ///< whether drop_oldest may remove it
  char* payload() { return reinterpret_cast<char*>(this) + kHeader; }
  /// The bytes that count against the queue's limit.
  int64_t charge() const { return int64_t{lines} * kLine; }
  static constexpr size_t kHeader = 48;
  static constexpr size_t kLine = 64;
  static constexpr size_t LinesFor(size_t bytes) {
    return (kHeader + bytes + kLine - 1) / kLine;
  }
};
static_assert(sizeof(TapEvent) == TapEvent::kHeader, "the payload is behind it");

/// Events of one device, oldest first, linked by `next`.
struct TapBatch {
  TapEvent* first = nullptr;  ///< null if the batch is empty
  TapEvent* last = nullptr;   ///< its `next` is null
  explicit operator bool() const { return first != nullptr; }
};

// Runs: events of one tap, which its function gets together (hc.tap(batch=...)).

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

/// On cache lines of its own, so that devices do not slow each other down.
class alignas(64) TapLane {
 public:
  static constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
  static constexpr size_t kOwnBlock = 1 << 16;  ///< larger events get an own slab

  /// The header fields of an event that the pusher knows.
  struct Label {
    int device;
    int64_t run;
    TapOwner& owner;
    size_t lines;
    bool droppable;
  };

  /// The sequence of the oldest queued event, or kNone. Needs no lock, so the
  /// answer may be outdated when the caller uses it; Take decides again under the
  /// lock.
  int64_t first() const { return first_.load(); }

  /// Appends an event. `fill(char*)` writes its payload; its position is drawn from
  /// `sequence`, and returned. Throws std::bad_alloc, and has then queued nothing.
  template <typename Fill>
  int64_t Store(SlabPool& pool, std::atomic<int64_t>& sequence, const Label& label,
                Fill& fill) {
    const size_t room = label.lines * TapEvent::kLine;
    if (room > kOwnBlock) {
      // Nobody else knows this slab yet, so the long copy needs no lock: the worker
      // and other devices of the lane are not held up.
      SlabPool::Slab* block = pool.Take(room);
      block->filling = false;
      TapEvent* event = Place(block, label);
      fill(event->payload());
      std::lock_guard<std::mutex> lock(mutex_);
      block->live = 1;
      return Link(event, sequence);
    }
    std::lock_guard<std::mutex> lock(mutex_);
    if (open_ == nullptr || open_->used + room > open_->capacity) {
      // A full slab has live events, the last of which will return it to the pool.
      // (A slab without events can't be full: Forget starts it anew.)
      if (open_ != nullptr) open_->filling = false;
      open_ = nullptr;  // Take may throw, and the full slab is no longer the lane's
      open_ = pool.Take(SlabPool::kSlabBytes);
    }
    TapEvent* event = Place(open_, label);
    fill(event->payload());
    ++open_->live;
    return Link(event, sequence);
  }

  /// Unlinks up to `most` events of one device from the head; with `all`,
  /// everything if that needs no look at single events.
  ///
  /// `second()` returns the sequence of the oldest event of the other lanes, or
  /// kNone. Nothing younger than that is taken, which keeps events of different
  /// devices in order. It must be evaluated under the lock:
  ///
  ///   1. device A: pushes an event into another lane; the push returns
  ///   2. device B: pushes a younger event into this lane
  ///   3. worker:   locks this lane and sees B's event, so it happens after 1, and
  ///                second() sees A's event
  ///
  /// If second() were evaluated before the lock, 1 and 2 could both happen in
  /// between, and B's event would be delivered before A's.
  template <typename Second>
  TapBatch Take(size_t most, bool all, Second second) {
    std::lock_guard<std::mutex> lock(mutex_);
    const int64_t bound = second();
    if (head_ == nullptr || head_->sequence >= bound) return {};
    TapBatch batch{head_, tail_};
    // The whole list can go in one step only if no other lane bounds it and one
    // device made it. Otherwise its events are looked at one by one, at most `most`
    // of them: each is a cache line that the device's core wrote last. Droppable
    // events are not taken all at once either: drop_oldest only reaches what is
    // still queued.
    if (!all || bound != kNone || !one_device_ || head_->droppable) {
      TapEvent* last = head_;
      for (size_t n = 1;
           n < most && last->next != nullptr && last->next->sequence < bound &&
           last->next->device == head_->device;
           ++n) {
        last = last->next;
      }
      batch.last = last;
    }
    SetHead(batch.last->next);
    batch.last->next = nullptr;
    under_way_ = batch.first->sequence;
    return batch;
  }

  /// Forgets delivered events from `first` up to, but without, `rest`; null means
  /// all up to the end of the batch. Their owners have been released already.
  void Finish(SlabPool& pool, TapEvent* first, TapEvent* rest) {
    // In portions, so that a device that wants to push does not wait for long.
    constexpr int kAtOnce = 64;
    for (TapEvent* event = first;;) {
      std::lock_guard<std::mutex> lock(mutex_);
      for (int i = 0; i < kAtOnce && event != rest; ++i) {
        TapEvent* next = event->next;  // before Forget, which may free the slab
        Forget(pool, event);
        event = next;
      }
      if (event != rest) continue;
      under_way_ = rest == nullptr ? kNone : rest->sequence;
      return;
    }
  }

  /// Puts the rest of a batch back at the head. Everything in the lane is younger.
  void GiveBack(TapBatch rest) {
    std::lock_guard<std::mutex> lock(mutex_);
    assert((head_ == nullptr || rest.last->sequence < head_->sequence) &&
           "only the worker takes events, and the oldest first");
    rest.last->next = head_;
    if (head_ == nullptr) tail_ = rest.last;
    SetHead(rest.first);
    under_way_ = kNone;
  }

  /// Drops the oldest droppable event and returns its charge, or 0 if it finds
  /// none. Gives up after kMostLooks events, since the lock is held: behind a long
  /// row of events that may not be dropped, it finds none.
  int64_t DropOldest(SlabPool& pool) {
    constexpr int kMostLooks = 1024;
    std::lock_guard<std::mutex> lock(mutex_);
    TapEvent* before = nullptr;
    TapEvent* event = head_;
    for (int i = 0; event != nullptr && !event->droppable; ++i) {
      if (i == kMostLooks) return 0;
      before = event;
      event = event->next;
    }
    if (event == nullptr) return 0;
    if (tail_ == event) tail_ = before;
    if (before == nullptr) {
      SetHead(event->next);
    } else {
      before->next = event->next;
    }
    return Drop(pool, event);
  }

  /// Drops the queued events before `mark`. Returns their charge, and adds their
  /// number to `*events`.
  int64_t DropBefore(SlabPool& pool, int64_t mark, int64_t* events) {
    constexpr int kAtOnce = 64;  // in portions, as in Finish
    int64_t charge = 0;
    for (;;) {
      std::lock_guard<std::mutex> lock(mutex_);
      for (int i = 0; i < kAtOnce; ++i) {
        TapEvent* event = head_;
        if (event == nullptr || event->sequence >= mark) return charge;
        SetHead(event->next);
        charge += Drop(pool, event);
        ++*events;
      }
    }
  }

  /// Whether every event before `mark` has been delivered or dropped.
  bool DoneBefore(int64_t mark) {
    std::lock_guard<std::mutex> lock(mutex_);
    return under_way_ >= mark && (head_ == nullptr || head_->sequence >= mark);
  }

 private:
  static constexpr int kNoDevice = std::numeric_limits<int>::min();

  /// Writes the header of an event at the end of a slab. The lane is locked, or the
  /// slab is the caller's alone.
  static TapEvent* Place(SlabPool::Slab* slab, const Label& label) {
    auto* event = new (slab->data() + slab->used) TapEvent;
    slab->used += label.lines * TapEvent::kLine;
    // In a recycled slab the worker's core had the next lines last. Fetching them
    // back takes 0.1 us, which passes here while the program goes on.
    __builtin_prefetch(slab->data() + slab->used + 4 * TapEvent::kLine, 1);
    event->next = nullptr;
    event->slab = slab;
    event->owner = &label.owner;
    label.owner.Retain();
    event->run = label.run;
    event->lines = static_cast<uint32_t>(label.lines);
    event->device = static_cast<int16_t>(label.device);
    event->droppable = label.droppable;
    return event;
  }

  // The lane is locked in all functions below.

  /// Appends an event to the list, and returns its position.
  int64_t Link(TapEvent* event, std::atomic<int64_t>& sequence) {
    // Drawn under the lock, so that the list is sorted by it.
    const int64_t position = sequence.fetch_add(1);
    event->sequence = position;
    if (device_ == kNoDevice) device_ = event->device;
    if (device_ != event->device) one_device_ = false;
    TapEvent* before = tail_;
    tail_ = event;
    if (before == nullptr) {
      SetHead(event);
    } else {
      before->next = event;
    }
    return position;
  }
  /// Makes `event` the oldest; null empties the list.
  void SetHead(TapEvent* event) {
    head_ = event;
    if (event == nullptr) tail_ = nullptr;
    first_.store(event == nullptr ? kNone : event->sequence);
  }
  /// Drops an event that is in the list no more; returns its charge.
  int64_t Drop(SlabPool& pool, TapEvent* event) {
    const int64_t charge = event->charge();
    event->owner->counts->dropped.fetch_add(1, std::memory_order_relaxed);
    event->owner->Release();
    Forget(pool, event);
    return charge;
  }
  /// Ends the life of an event's memory; the event must not be read afterwards.
  void Forget(SlabPool& pool, TapEvent* event) {
    SlabPool::Slab* slab = event->slab;
    if (--slab->live != 0) return;
    if (slab->filling) {
      slab->used = 0;  // the lane's open slab: its next event goes to its start
    } else {
      pool.Give(slab);
    }
  }

  // Guards the fields below (first_ may be read without it), the links of the
  // queued events, and the headers of this lane's slabs. Its parties are the
  // devices of this lane, for one push at a time, and the one worker. A lane for
  // each device is the finer scheme already. A lock-free list would not do:
  // drop_oldest removes from the middle, and an event must not be dropped while the
  // worker takes it.
  std::mutex mutex_;
  TapEvent* head_ = nullptr;        ///< oldest queued event, or null
  TapEvent* tail_ = nullptr;        ///< youngest queued event, or null
  SlabPool::Slab* open_ = nullptr;  ///< takes the next small event; null before one
  int64_t under_way_ = kNone;       ///< oldest event the worker has, or kNone
  int device_ = kNoDevice;          ///< device of the first event ever pushed here
  bool one_device_ = true;          ///< all events so far came from device_
  /// head_'s sequence, or kNone. Sequentially consistent, for the race with a
  /// worker that goes to sleep (tap_queue.h).
  std::atomic<int64_t> first_{kNone};
};

}  // namespace hostcall
