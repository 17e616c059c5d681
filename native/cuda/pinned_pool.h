// Pinned host memory, recycled. Allocating a pinned block takes milliseconds and
// may wait for the device, so the steady state must not allocate.
//
// Does not depend on Python or XLA (tests/native/pinned_pool_test.cc).
//
// Guarantees
//   * The bytes of all blocks, in use or kept for reuse, stay within the limit.
//     There are two exceptions: a request above the limit is granted when no other
//     block is in use, and overruns (below).
//   * First come, first served. A request that finds the pool full waits, and later
//     requests do not overtake it. So small requests can't starve a large one.
//   * No block is reused while it is in use. A block is handed out again only after
//     its owner has released it (Release: nobody uses it any more), or after an
//     event that was recorded on a stream behind all its uses has been seen to have
//     ended (ReleaseAfter). If no event can be recorded, the pool waits for the
//     stream. If that fails too, the block is lost: it stays counted as in use, and
//     is never handed out.
//   * In the steady state Acquire takes one lock, at most queries the pending
//     events, and allocates nothing.
//
// The lock. No call of the driver is made under it, and Release makes no call of
// the driver at all. Therefore a block may be released in a host function, where
// CUDA is forbidden. The ring that this breaks:
//
//   1. dispatching thread: is inside cuMemHostAlloc or cuMemFreeHost, which wait
//                          for the device
//   2. device:             waits for a host function to return
//   3. host function:      releases a block, for which it needs the lock
//
// Blocks are allocated and freed, and events queried, by the thread whose turn it
// is (Turn, by tickets), with the lock released. No host function ever waits for a
// turn.
//
// No deadlock. Each call takes exactly one block for all its operands and results,
// so the engine never holds one block while it waits for another. But users'
// functions and devices may wait for each other, which the engine can't see:
//
//   1. devices 0 to 2: hold all blocks; their functions wait for that of device 3
//                      in a barrier, or their streams for device 3 in a collective
//   2. device 3:       waits for a block before it gets there
//
// That looks like a slow function. So a request that has waited for `grace`, in
// which not one block came back, goes over the limit, and is counted (`overruns`):
// the limit bounds memory, and is no reason to hang. For the same reason a full
// pool polls its events: cuEventSynchronize has no timeout.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "base/no_copy.h"
#include "cuda/cuda_driver.h"

namespace hostcall {

class PinnedPool;

/// One piece of pinned memory, and the event that tells when its last use has
/// ended. It belongs to a PinnedBlock, or to one of the pool's lists, which are
/// linked through it. So giving it back allocates nothing, and can't fail.
struct PinnedMemory {
  char* data = nullptr;           ///< the pinned bytes; owned
  size_t capacity = 0;            ///< bytes at `data`
  CudaContext context = nullptr;  ///< the context it was allocated in
  CudaEvent event = nullptr;      ///< owned; null before the first ReleaseAfter
  CudaContext event_context = nullptr;  ///< the context the event was made in
  PinnedMemory* next = nullptr;         ///< in a list of the pool's; owned
};

/// Owns a block, or is empty. Its destructor releases the block. The pool outlives
/// it.
class PinnedBlock {
 public:
  PinnedBlock() = default;
  char* data() const { return memory_ ? memory_->data : nullptr; }
  /// Bytes at `data`.
  size_t capacity() const { return memory_ ? memory_->capacity : 0; }
  explicit operator bool() const { return memory_ != nullptr; }

  /// Returns the block to the pool now: nobody uses its memory any more. Makes no
  /// CUDA call, so a host function may do it.
  void Release() noexcept { memory_.reset(); }

  /// Returns the block to the pool when everything that is enqueued on the stream
  /// by now has ended. Does not wait, unless no event can be recorded. Needs no
  /// current context. Throws CudaError if nothing can tell when the work ends; the
  /// memory is then lost. This object is empty afterwards in any case.
  void ReleaseAfter(CudaStream stream);

 private:
  friend class PinnedPool;
  struct Give {
    PinnedPool* pool;
    void operator()(PinnedMemory* memory) const noexcept;
  };
  PinnedBlock(PinnedPool* pool, PinnedMemory* memory) : memory_(memory, {pool}) {}
  std::unique_ptr<PinnedMemory, Give> memory_{nullptr, {nullptr}};
};

/// Safe to use from several threads. A process never destroys its pools; if a pool
/// is destroyed, no block of it is in use or pending.
class PinnedPool : NoCopy {
 public:
  static constexpr size_t kLeast = size_t{4} << 10;  ///< the smallest capacity
  static constexpr size_t kStep = size_t{1} << 20;   ///< see CapacityFor
  static constexpr std::chrono::milliseconds kGrace{1000};

  struct Stats {
    size_t limit = 0;            ///< bound on allocated_bytes
    size_t allocated_bytes = 0;  ///< all pinned memory, in use, pending or idle
    size_t in_use_bytes = 0;     ///< owned by a PinnedBlock, or lost
    size_t pending_bytes = 0;    ///< behind an event that was not yet seen to end
    size_t peak_bytes = 0;       ///< the most that allocated_bytes has been
    int64_t allocations = 0;     ///< blocks that were allocated
    int64_t reuses = 0;          ///< requests that got a recycled block
    int64_t waits = 0;           ///< requests that found the pool full and waited
    int64_t overruns = 0;  ///< requests that went over the limit after `grace`
  };

  /// `limit` is in bytes.
  explicit PinnedPool(size_t limit, std::chrono::milliseconds grace = kGrace)
      : grace_(grace) {
    stats_.limit = limit;
  }

  /// Returns a block of at least `bytes`, with undefined content. Waits if the pool
  /// is full. A context must be current (ScopedContext). Throws CudaError if the
  /// driver has no memory.
  ///
  /// Without `may_wait`, returns an empty block instead of waiting for a block to
  /// come back, or for other requests that do so. It may still wait for an
  /// allocation that is under way, and may allocate.
  PinnedBlock Acquire(size_t bytes, bool may_wait = true);

  /// Sets the limit in bytes. Frees blocks above a lower limit that are neither in
  /// use nor pending, unless a request waits for a block. Needs no context.
  void set_limit(size_t bytes);
  Stats stats() const;

  /// The capacity of a block for `bytes`: a power of two up to kStep, above it a
  /// multiple of kStep. SmallArray capacities mean that blocks fit again.
  static size_t CapacityFor(size_t bytes);

 private:
  friend class PinnedBlock;
  using Lock = std::unique_lock<std::mutex>;
  class Turn;

  bool IsNobodysTurn() const { return serving_ == tickets_; }
  bool Fits(size_t capacity) const;
  PinnedBlock Reuse(size_t capacity);

  // Called by the thread whose turn it is, with the lock, which they release while
  // they call the driver. Nobody else takes blocks out of the pool meanwhile.
  void Collect(Lock& lock);
  bool WaitForReturn(Lock& lock);
  void Evict(Lock& lock, size_t most);
  PinnedMemory* Allocate(Lock& lock, size_t capacity);

  void Give(PinnedMemory* memory) noexcept;
  void GiveAfter(PinnedMemory* memory, CudaStream stream);
  bool Record(PinnedMemory& memory, CudaStream stream) const;
  void MakeIdle(PinnedMemory* memory) noexcept;
  void DestroyEvent(PinnedMemory& memory) const noexcept;
  void Free(PinnedMemory* memory) const noexcept;

  const std::chrono::milliseconds grace_;
  // Guards the fields below. Its parties are XLA's threads that take and release
  // blocks, and the driver's threads that release them in host functions, where
  // they must not wait for long: so it is held for a few list operations, and never
  // during a call of the driver. Long work is serialised by the turns instead.
  mutable std::mutex mutex_;
  /// Notified when a turn ends, a block comes back, the limit or full_ changes.
  std::condition_variable changed_;
  /// Free blocks by capacity, the last used first. Every capacity that was ever
  /// allocated keeps its entry, so that returning a block allocates nothing.
  std::map<size_t, PinnedMemory*> idle_;
  PinnedMemory* pending_ = nullptr;  ///< behind an event
  /// May be in use by a device for ever; never freed.
  PinnedMemory* lost_ = nullptr;
  Stats stats_;
  uint64_t tickets_ = 0;  ///< turns that were requested; the next ticket
  uint64_t serving_ = 0;  ///< the ticket that has the turn; none if tickets_
  uint64_t returns_ = 0;  ///< blocks that came back, and changes of the limit
  bool full_ = false;     ///< the thread whose turn it is waits for a block
};

}  // namespace hostcall
