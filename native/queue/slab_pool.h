// Memory that is used again, so that the steady state allocates nothing.
//
// Knows no Python (tests/native/tap_queue_test.cc).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>
#include <vector>

namespace hostcall {

/// Memory for events. Blocks of one size are recycled, larger ones up to a bound.
class SlabPool {
 public:
  static constexpr size_t kSlabBytes = size_t{1} << 18;

  struct Slab {
    size_t capacity;
    size_t used = 0;
    int64_t live = 0;     ///< events in it that are not done; under the lane's lock
    bool filling = true;  ///< its lane still adds to it
    char* data() { return reinterpret_cast<char*>(this) + kHeader; }
  };

  ~SlabPool() { Trim(0); }

  Slab* Take(size_t bytes) {
    // In steps of an eighth or less, so that values of about one size share blocks.
    size_t step = kSlabBytes / 4;
    while (step * 16 < bytes) step *= 2;
    const size_t capacity = (bytes + step - 1) / step * step;
    {
      std::lock_guard<std::mutex> lock(mutex_);
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
    void* memory = std::aligned_alloc(kHeader, capacity + kHeader);
    if (memory == nullptr) throw std::bad_alloc();
    Slab* slab = new (memory) Slab;
    slab->capacity = capacity;
    return slab;
  }

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

  /// Gives back to the system what is cached above `bytes`.
  void Trim(size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    while (cached_ > bytes) {
      cached_ -= free_.back()->capacity;
      Free(free_.back());
      free_.pop_back();
    }
  }

  void set_most_cached(size_t bytes) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      most_cached_ = bytes;
    }
    Trim(bytes);
  }

 private:
  static constexpr size_t kHeader = 64;
  static_assert(sizeof(Slab) <= kHeader, "the data starts behind the header");
  static void Free(Slab* slab) {
    slab->~Slab();
    std::free(slab);
  }
  std::mutex mutex_;
  std::vector<Slab*> free_;
  size_t cached_ = 0;
  size_t most_cached_ = size_t{128} << 20;
};

}  // namespace hostcall
