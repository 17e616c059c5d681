// The taps of one device (of a few, where there are many), oldest first.
//
// Knows no Python (tests/native/tap_queue_test.cc).
//
// Guarantees: first in, first out. One lock, which a push takes once and the worker
// once a batch; no work under it grows with what is queued, but where events have
// to be told apart (several lanes at work, drop_oldest), and that is bounded.
//
// Memory. An event lies in a slab, behind the one before it, or alone in a block
// where it is large. A slab goes back to the pool when it is full and its last
// event is done. `owner` is retained from push to the end of the delivery, so a
// program may die with events on the way.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <mutex>
#include <new>

#include "base/slot_table.h"
#include "queue/slab_pool.h"

namespace hostcall {

/// Taps that were not delivered, by the reason.
struct TapCounts {
  std::atomic<int64_t> dropped{0};  ///< the queue was full
  std::atomic<int64_t> masked{0};   ///< `where` was False
  std::atomic<int64_t> skipped{0};  ///< `every` or `sample` left them out
};

/// Who an event belongs to.
class TapOwner : public Mortal {
 public:
  TapCounts* counts = nullptr;  ///< lives as long as the owner
};

/// A scalar's event is one line of the cache, which two cores hand to each other.
struct TapEvent {
  TapEvent* next;
  SlabPool::Slab* slab;
  TapOwner* owner;   ///< retained
  int64_t sequence;  ///< counts all events of the process
  int64_t run;       ///< XLA's number of the execution; -1 for an eager tap
  uint32_t lines;    ///< of 64 bytes that it takes
  int16_t device;    ///< ordinal, -1 for an eager tap
  bool droppable;    ///< its policy is to go when the queue is full
  char* payload() { return reinterpret_cast<char*>(this) + kHeader; }
  /// What counts against the limit.
  int64_t charge() const { return int64_t{lines} * kLine; }
  static constexpr size_t kHeader = 48;
  static constexpr size_t kLine = 64;
  static constexpr size_t LinesFor(size_t bytes) {
    return (kHeader + bytes + kLine - 1) / kLine;
  }
};
static_assert(sizeof(TapEvent) == TapEvent::kHeader, "the payload is behind it");

/// Events of one device, oldest first.
struct TapBatch {
  TapEvent* first = nullptr;
  TapEvent* last = nullptr;
  explicit operator bool() const { return first != nullptr; }
};

class alignas(64) TapLane {
 public:
  static constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
  static constexpr size_t kOwnBlock = 1 << 16;  ///< larger events lie alone

  struct Label {
    int device;
    int64_t run;
    TapOwner& owner;
    size_t lines;
    bool droppable;
  };

  /// Number of the oldest event, kNone where there is none: a look without the
  /// lock.
  int64_t first() const { return first_.load(); }

  /// `fill(char*)` writes the event; its number is drawn from `sequence`.
  template <typename Fill>
  void Store(SlabPool& pool, std::atomic<int64_t>& sequence, const Label& label,
             Fill& fill) {
    const size_t room = label.lines * TapEvent::kLine;
    if (room > kOwnBlock) {  // written before the lane is locked
      SlabPool::Slab* block = pool.Take(room);
      block->filling = false;
      TapEvent* event = Place(block, label);
      fill(event->payload());
      std::lock_guard<std::mutex> lock(mutex_);
      block->live = 1;
      Link(event, sequence);
      return;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    if (open_ == nullptr || open_->used + room > open_->capacity) {
      // It holds events: one that holds none is empty, and has room (Forget).
      if (open_ != nullptr) open_->filling = false;
      open_ = nullptr;
      open_ = pool.Take(SlabPool::kSlabBytes);
    }
    TapEvent* event = Place(open_, label);
    fill(event->payload());
    ++open_->live;
    Link(event, sequence);
  }

  /// Takes up to `most` events of one device, or with `all` what there is.
  ///
  /// `second()` is the number of the oldest event of the other lanes: nothing
  /// younger is taken. It is asked under the lock. What was pushed before an event
  /// that is in this lane is in its own lane by now, and `second` sees it.
  template <typename Second>
  TapBatch Take(size_t most, bool all, Second second) {
    std::lock_guard<std::mutex> lock(mutex_);
    const int64_t bound = second();
    if (head_ == nullptr || head_->sequence >= bound) return {};
    TapBatch batch{head_, tail_};
    // What may be dropped stays in reach of DropOldest.
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

  /// Forgets events that were delivered, from `first` up to `rest`, which is next.
  void Finish(SlabPool& pool, TapEvent* first, TapEvent* rest) {
    constexpr int kAtOnce = 64;  // the device does not wait for long
    for (TapEvent* event = first;;) {
      std::lock_guard<std::mutex> lock(mutex_);
      for (int i = 0; i < kAtOnce && event != rest; ++i) {
        TapEvent* next = event->next;
        Forget(pool, event);
        event = next;
      }
      if (event != rest) continue;
      under_way_ = rest == nullptr ? kNone : rest->sequence;
      return;
    }
  }

  /// Puts what is left of a batch back at the head.
  void GiveBack(TapBatch rest) {
    std::lock_guard<std::mutex> lock(mutex_);
    rest.last->next = head_;
    if (head_ == nullptr) tail_ = rest.last;
    SetHead(rest.first);
    under_way_ = kNone;
  }

  /// Drops the oldest event that may be dropped, and gives its charge; 0 for none.
  /// Looks at so many: behind a long row of others it finds none.
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
    const int64_t charge = event->charge();
    event->owner->counts->dropped.fetch_add(1, std::memory_order_relaxed);
    event->owner->Release();
    Forget(pool, event);
    return charge;
  }

  /// Drops the events before `mark`, and gives their charge and number.
  int64_t DropBefore(SlabPool& pool, int64_t mark, int64_t* events) {
    constexpr int kAtOnce = 64;  // the device does not wait for long
    int64_t charge = 0;
    for (;;) {
      std::lock_guard<std::mutex> lock(mutex_);
      for (int i = 0; i < kAtOnce; ++i) {
        TapEvent* event = head_;
        if (event == nullptr || event->sequence >= mark) return charge;
        SetHead(event->next);
        charge += event->charge();
        ++*events;
        event->owner->counts->dropped.fetch_add(1, std::memory_order_relaxed);
        event->owner->Release();
        Forget(pool, event);
      }
    }
  }

  /// Whether every event before `mark` is done.
  bool DoneBefore(int64_t mark) {
    std::lock_guard<std::mutex> lock(mutex_);
    return under_way_ >= mark && (head_ == nullptr || head_->sequence >= mark);
  }

  void GiveSlabTo(SlabPool& pool) {
    if (open_ != nullptr) pool.Give(open_);
    open_ = nullptr;
  }

 private:
  static constexpr int kNoDevice = std::numeric_limits<int>::min();

  static TapEvent* Place(SlabPool::Slab* slab, const Label& label) {
    auto* event = new (slab->data() + slab->used) TapEvent;
    slab->used += label.lines * TapEvent::kLine;
    // The worker's core has had these lines last: fetching them back takes 0.1 us,
    // and happens while the program goes on.
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

  // The lane is locked in all below.

  void Link(TapEvent* event, std::atomic<int64_t>& sequence) {
    event->sequence = sequence.fetch_add(1);
    if (device_ == kNoDevice) device_ = event->device;
    if (device_ != event->device) one_device_ = false;
    TapEvent* before = tail_;
    tail_ = event;
    if (before == nullptr) {
      SetHead(event);
    } else {
      before->next = event;
    }
  }
  void SetHead(TapEvent* event) {
    head_ = event;
    if (event == nullptr) tail_ = nullptr;
    first_.store(event == nullptr ? kNone : event->sequence);
  }
  void Forget(SlabPool& pool, TapEvent* event) {
    SlabPool::Slab* slab = event->slab;
    if (--slab->live != 0) return;
    if (slab->filling) {
      slab->used = 0;  // empty again: filled from its start
    } else {
      pool.Give(slab);
    }
  }

  std::mutex mutex_;  // guards all below but what is atomic
  TapEvent* head_ = nullptr;
  TapEvent* tail_ = nullptr;
  SlabPool::Slab* open_ = nullptr;     ///< where the next small event goes
  int64_t under_way_ = kNone;          ///< first event that the worker has taken
  int device_ = kNoDevice;             ///< of the events so far
  bool one_device_ = true;             ///< they all are of that one
  std::atomic<int64_t> first_{kNone};  ///< head's number
};

}  // namespace hostcall
