// Recycled memory for tap events, so that the steady state allocates nothing.
//
// A lane (tap_lane.h) lays small events one behind the other in a slab of
// kSlabBytes, and gives a large event a slab of its own. A slab returns to the pool
// when its last event is done and its lane adds no more to it.
//
// Does not depend on Python (tests/native/tap_queue_test.cc).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>
#include <vector>

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
    Free(slab);
  }

  /// Bounds the bytes that the pool keeps for reuse. Frees cached slabs above that,
  /// the newest first.
  void set_most_cached(size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    most_cached_ = bytes;
    while (cached_ > bytes) {
      cached_ -= free_.back()->capacity;
      Free(free_.back());
      free_.pop_back();
    }
  }

 private:
  /// A cache line, so that the data is aligned to one as well.
  static constexpr size_t kHeader = 64;
  static_assert(sizeof(Slab) <= kHeader, "the data starts behind the header");
  static void Free(Slab* slab) {
    slab->~Slab();
    std::free(slab);
  }

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

}  // namespace hostcall
