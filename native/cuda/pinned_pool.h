// Pinned host memory, used again: allocating a block costs milliseconds
// and may wait for the device, so the steady state must not.
//
// Knows no Python and no XLA (tests/native/staging_test.cc).
//
// Guarantees
//   * The bytes of all blocks (out, or kept for the next) stay within the limit. A
//     request above it goes alone; and there are overruns (below).
//   * First come, first served: who finds the pool full waits, and who comes later
//     does not overtake, so a large request is not starved by small ones.
//   * No use after reuse. A block is handed out again only when it was let go by
//     its owner, who says that nobody uses it (Release), or when an event that was
//     recorded on a stream behind all that uses it has been seen to have ended
//     (ReleaseAfter). Where no event can be recorded the stream is waited for;
//     where that fails too, the block is lost, never handed out: it stays counted
//     as in use.
//   * In the steady state Acquire takes a lock, asks at most for the events that
//     are pending, and allocates nothing.
//
// No call of the driver is made under the lock, and Release makes none at all. So a
// block may be let go in a host function, where CUDA is forbidden, and:
//   1. dispatching thread: in cuMemHostAlloc or cuMemFreeHost, waits for the device
//   2. device: waits for a host function
//   3. host function: lets a block go, and needs the lock
// does not end in a ring. The one that may allocate, free and ask is the one whose
// turn it is (the tickets below), for which no host function ever waits.
//
// No deadlock. Each call takes exactly one block for all its operands and results,
// so the engine never holds one block and waits for another. But the users'
// functions and the devices may wait for each other, behind our back:
//   1. devices 0 to 2: hold all blocks, their functions wait for that of device 3
//      (a barrier), or their streams for device 3 in a collective
//   2. device 3: waits for a block before it gets there
// That can't be told from a slow function. So who has waited for `grace` in which
// not one block came back goes over the limit, which is counted (`overruns`): the
// limit is a bound on memory, and no reason to hang. For the same reason a full
// pool polls its events: cuEventSynchronize has no time limit.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

#include "cuda/cuda_driver.h"

namespace hostcall {

class PinnedPool;

/// One piece of pinned memory, and the event that tells when its last use has
/// ended.
struct PinnedMemory {
  char* data = nullptr;
  size_t capacity = 0;
  CudaContext context = nullptr;        ///< in which it was allocated
  CudaEvent event = nullptr;            ///< null before the first ReleaseAfter
  CudaContext event_context = nullptr;  ///< in which the event was made
  PinnedMemory* next = nullptr;         ///< in the list in which it is
};

/// Owns a block; gives it back when it goes. The pool outlives it.
class PinnedBlock {
 public:
  PinnedBlock() = default;
  PinnedBlock(PinnedBlock&& other) noexcept { Swap(other); }
  PinnedBlock& operator=(PinnedBlock&& other) noexcept {
    PinnedBlock(std::move(other)).Swap(*this);
    return *this;
  }
  PinnedBlock(const PinnedBlock&) = delete;
  PinnedBlock& operator=(const PinnedBlock&) = delete;
  ~PinnedBlock() { Release(); }

  char* data() const { return memory_ != nullptr ? memory_->data : nullptr; }
  size_t size() const { return size_; }  ///< as asked for
  explicit operator bool() const { return memory_ != nullptr; }

  /// Back to the pool now: nobody uses the memory any more. Makes no CUDA call.
  void Release() noexcept;

  /// Back to the pool when all that is enqueued on the stream by now has ended.
  /// Doesn't wait, and needs no current context. Throws CudaError where the end
  /// can't be told; the block is then lost. It is empty afterwards in any case.
  void ReleaseAfter(CudaStream stream);

 private:
  friend class PinnedPool;
  PinnedBlock(PinnedPool* pool, PinnedMemory* memory, size_t size)
      : pool_(pool), memory_(memory), size_(size) {}
  void Swap(PinnedBlock& other) noexcept {
    std::swap(pool_, other.pool_);
    std::swap(memory_, other.memory_);
    std::swap(size_, other.size_);
  }
  PinnedPool* pool_ = nullptr;
  PinnedMemory* memory_ = nullptr;
  size_t size_ = 0;
};

class PinnedPool {
 public:
  static constexpr size_t kLeast = size_t{4} << 10;
  static constexpr size_t kStep = size_t{1} << 20;
  static constexpr std::chrono::milliseconds kGrace{1000};

  struct Stats {
    size_t allocated_bytes = 0;  ///< all that is pinned
    size_t in_use_bytes = 0;     ///< owned by a PinnedBlock, or lost
    size_t pending_bytes = 0;    ///< waits for an event, as far as is known
    size_t peak_bytes = 0;       ///< the most that was ever allocated
    int64_t allocations = 0;
    int64_t reuses = 0;
    int64_t waits = 0;     ///< acquisitions that found the pool full
    int64_t overruns = 0;  ///< of these, the ones that went over the limit
  };

  PinnedPool(const CudaDriver& driver, size_t limit,
             std::chrono::milliseconds grace = kGrace)
      : driver_(driver), grace_(grace), limit_(limit) {}
  /// Waits for pending events. No block is owned any more.
  ~PinnedPool();
  PinnedPool(const PinnedPool&) = delete;
  PinnedPool& operator=(const PinnedPool&) = delete;

  /// A block of at least so many bytes, whose content is undefined. Waits where the
  /// pool is full. A context is current (ScopedContext). Throws CudaError where
  /// there is no memory.
  PinnedBlock Acquire(size_t bytes);

  /// The same, but empty where it would have to wait for a block or for others that
  /// wait for one. May allocate.
  PinnedBlock TryAcquire(size_t bytes);

  /// Gives back to the system what is not in use or pending. Needs no context.
  void Trim();
  void set_limit(size_t bytes);
  size_t limit() const;
  Stats stats() const;

  /// What a block for so many bytes takes: a power of two, then steps of a MiB.
  static size_t CapacityFor(size_t bytes);

 private:
  friend class PinnedBlock;
  using Lock = std::unique_lock<std::mutex>;

  /// Oldest first, linked through the memory itself: giving back can't fail.
  struct List {
    PinnedMemory* first = nullptr;
    PinnedMemory* last = nullptr;
    void Append(PinnedMemory* memory);
    void Prepend(List others);
    PinnedMemory* Pop();
  };
  class Turn;

  PinnedBlock Take(size_t bytes, bool may_wait);
  bool Fits(size_t capacity) const;
  PinnedMemory* PopIdle(size_t capacity);
  PinnedBlock HandOut(PinnedMemory* memory, size_t bytes);

  // The one whose turn it is. These let go of the lock meanwhile.
  void Collect(Lock& lock);
  bool WaitForReturn(Lock& lock);
  void Evict(Lock& lock, size_t most);
  PinnedMemory* Allocate(Lock& lock, size_t capacity);

  void Give(PinnedMemory* memory) noexcept;
  void GiveAfter(PinnedMemory* memory, CudaStream stream);
  bool Record(PinnedMemory* memory, CudaStream stream) const;
  void MakeIdle(PinnedMemory* memory) noexcept;
  void DestroyEvent(PinnedMemory* memory) const noexcept;
  void Free(PinnedMemory* memory) const noexcept;

  const CudaDriver& driver_;
  const std::chrono::milliseconds grace_;
  mutable std::mutex mutex_;  ///< guards all below
  std::condition_variable changed_;
  size_t limit_;
  std::map<size_t, PinnedMemory*> idle_;  ///< by capacity, the last one used first
  List pending_, lost_;
  Stats stats_;
  uint64_t tickets_ = 0;  ///< turns that were asked for
  uint64_t serving_ = 0;  ///< whose turn it is; nobody's where the two are equal
  uint64_t returns_ = 0;  ///< blocks that came back, and changes of the limit
  bool full_ = false;     ///< the one whose turn it is waits for a block
};

}  // namespace hostcall
