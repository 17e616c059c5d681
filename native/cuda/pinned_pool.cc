#include "cuda/pinned_pool.h"

#include <algorithm>
#include <utility>

namespace hostcall {
namespace {

/// Time between two polls of the events of a full pool. Copying 1 MiB takes about
/// as long, so polling more often would find little more.
constexpr std::chrono::microseconds kPoll{100};

void Push(PinnedMemory*& list, PinnedMemory* memory) {
  memory->next = std::exchange(list, memory);
}
PinnedMemory* Pop(PinnedMemory*& list) { return std::exchange(list, list->next); }

}  // namespace

// --- Blocks ---------------------------------------------------------------------

void PinnedBlock::Give::operator()(PinnedMemory* memory) const noexcept {
  pool->Give(memory);
}

void PinnedBlock::ReleaseAfter(CudaStream stream) {
  if (*this) memory_.get_deleter().pool->GiveAfter(memory_.release(), stream);
}

// --- Taking ---------------------------------------------------------------------

/// The right to allocate, free and query events, for the guard's life. It is a lock
/// with tickets rather than a second mutex: a mutex is not first come, first
/// served, and could not be waited for together with `full_`.
///
/// Without `may_wait`, waits for the current holder only while that one makes
/// progress, and converts to false if it waits for a block itself.
class PinnedPool::Turn : NoCopy {
 public:
  Turn(PinnedPool& pool, Lock& lock, bool may_wait) : pool_(pool), lock_(lock) {
    pool.changed_.wait(
        lock, [&] { return may_wait || pool.full_ || pool.IsNobodysTurn(); });
    mine_ = may_wait || pool.IsNobodysTurn();
    if (!mine_) return;
    pool.changed_.wait(
        lock, [&pool, mine = pool.tickets_++] { return pool.serving_ == mine; });
  }
  ~Turn() {
    if (!mine_) return;
    if (!lock_.owns_lock()) lock_.lock();  // Allocate throws without the lock
    ++pool_.serving_;
    pool_.changed_.notify_all();
  }
  explicit operator bool() const { return mine_; }

 private:
  PinnedPool& pool_;
  Lock& lock_;
  bool mine_;
};

size_t PinnedPool::CapacityFor(size_t bytes) {
  if (bytes > kStep) return (bytes + kStep - 1) / kStep * kStep;
  size_t capacity = kLeast;
  while (capacity < bytes) capacity *= 2;
  return capacity;
}

/// A request that is not served at once waits for its turn, collects what has come
/// back, waits until it fits, and then takes or allocates a block.
PinnedBlock PinnedPool::Acquire(size_t bytes, bool may_wait) {
  const size_t capacity = CapacityFor(bytes);
  Lock lock(mutex_);
  // The steady state: nobody is before this request, and nothing has to be evicted.
  if (IsNobodysTurn() && Fits(capacity) && stats_.allocated_bytes <= stats_.limit) {
    if (PinnedBlock block = Reuse(capacity)) return block;
  }
  Turn turn(*this, lock, may_wait);
  if (!turn) return {};
  Collect(lock);
  if (!Fits(capacity)) {
    if (!may_wait) return {};
    ++stats_.waits;
    bool over = false;
    while (!over && !Fits(capacity)) over = !WaitForReturn(lock);
    if (over) ++stats_.overruns;
  }
  // From here on the bytes in use only shrink: nobody takes a block before the turn
  // ends. So Fits, once true, stays true while the lock is released below.
  PinnedBlock block = Reuse(capacity);
  // Frees idle blocks first, so that the limit holds while a new one is allocated.
  // After an overrun, or below a new limit, more may be allocated than allowed.
  Evict(lock,
        block ? stats_.limit : stats_.limit - std::min(stats_.limit, capacity));
  if (!block) block = PinnedBlock(this, Allocate(lock, capacity));
  return block;
}

/// Whether a block of this capacity may be handed out. Idle blocks do not count:
/// they are evicted when room is needed. The lock is held.
bool PinnedPool::Fits(size_t capacity) const {
  const size_t out = stats_.in_use_bytes + stats_.pending_bytes;
  return out == 0 || out + capacity <= stats_.limit;
}

/// Makes an idle block of exactly this capacity the caller's; empty if there is
/// none. The lock is held.
PinnedBlock PinnedPool::Reuse(size_t capacity) {
  const auto idle = idle_.find(capacity);
  if (idle == idle_.end() || idle->second == nullptr) return {};
  ++stats_.reuses;
  stats_.in_use_bytes += capacity;
  return PinnedBlock(this, Pop(idle->second));
}

/// Moves the pending blocks with ended events to the idle ones. If an event can't
/// be queried, its block stays pending: the device may still use it.
void PinnedPool::Collect(Lock& lock) {
  PinnedMemory* queried = std::exchange(pending_, nullptr);
  PinnedMemory* ended = nullptr;
  if (queried == nullptr) return;
  // Without the lock the list `queried` is safe: only the holder of the turn
  // collects.
  lock.unlock();
  PinnedMemory* under_way = nullptr;
  while (queried != nullptr) {
    PinnedMemory* memory = Pop(queried);
    const int code = Driver().cuEventQuery(memory->event);
    Push(code == kCudaSuccess ? ended : under_way, memory);
  }
  lock.lock();
  while (under_way != nullptr) Push(pending_, Pop(under_way));
  while (ended != nullptr) {
    stats_.pending_bytes -= ended->capacity;
    MakeIdle(Pop(ended));
  }
}

/// Waits until a block comes back, or the limit changes. False if that does not
/// happen for the whole grace.
bool PinnedPool::WaitForReturn(Lock& lock) {
  const uint64_t before = returns_;
  const auto until = std::chrono::steady_clock::now() + grace_;
  full_ = true;
  changed_.notify_all();  // a request that may not wait gives up
  while (returns_ == before && std::chrono::steady_clock::now() < until) {
    // A Release notifies; the end of an event does not, so it is polled.
    changed_.wait_for(lock, kPoll, [&] { return returns_ != before; });
    Collect(lock);
  }
  full_ = false;
  return returns_ != before;
}

/// Frees idle blocks, the largest first, until at most `most` bytes are allocated
/// or no idle block is left.
void PinnedPool::Evict(Lock& lock, size_t most) {
  PinnedMemory* doomed = nullptr;
  for (auto at = idle_.rbegin(); at != idle_.rend(); ++at) {
    while (at->second != nullptr && stats_.allocated_bytes > most) {
      // Counted as freed now: only the holder of the turn, this thread, allocates.
      stats_.allocated_bytes -= at->first;
      Push(doomed, Pop(at->second));
    }
  }
  if (doomed == nullptr) return;
  lock.unlock();
  while (doomed != nullptr) Free(Pop(doomed));
  lock.lock();
}

/// Allocates a block in the current context. Throws CudaError, without the lock.
PinnedMemory* PinnedPool::Allocate(Lock& lock, size_t capacity) {
  idle_.try_emplace(capacity);  // here, since MakeIdle must not allocate
  auto memory = std::make_unique<PinnedMemory>();
  memory->capacity = capacity;
  for (;;) {
    lock.unlock();
    void* data = nullptr;
    Driver().Check(Driver().cuCtxGetCurrent(&memory->context), "cuCtxGetCurrent");
    const int code =
        Driver().cuMemHostAlloc(&data, capacity, kCudaHostAllocPortable);
    lock.lock();
    if (code == kCudaSuccess) {
      memory->data = static_cast<char*>(data);
      ++stats_.allocations;
      stats_.in_use_bytes += capacity;
      stats_.allocated_bytes += capacity;
      stats_.peak_bytes = std::max(stats_.peak_bytes, stats_.allocated_bytes);
      return memory.release();
    }
    // Without memory, the idle blocks go first; if there were any, it is worth a
    // retry.
    const size_t before = stats_.allocated_bytes;
    if (code == kCudaOutOfMemory) Evict(lock, 0);
    if (stats_.allocated_bytes != before) continue;
    lock.unlock();
    Driver().Check(code, "cuMemHostAlloc");
  }
}

// --- Giving back ----------------------------------------------------------------

/// Puts a block that nobody uses among the idle ones. The lock is held.
void PinnedPool::MakeIdle(PinnedMemory* memory) noexcept {
  Push(idle_.find(memory->capacity)->second, memory);
  ++returns_;
  if (!IsNobodysTurn()) changed_.notify_all();  // somebody has a turn, or waits
}

/// Takes back a block that nobody uses. Must not call the driver: host functions
/// call this.
void PinnedPool::Give(PinnedMemory* memory) noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  stats_.in_use_bytes -= memory->capacity;
  MakeIdle(memory);
}

/// Takes back a block that work on the stream may still use. The driver is called
/// without the lock: the block is in no list of the pool's yet, so only this thread
/// knows it.
void PinnedPool::GiveAfter(PinnedMemory* memory, CudaStream stream) {
  const bool recorded = Record(*memory, stream);
  // If no event could be recorded, waiting for the stream tells the same, but
  // slowly.
  const int code = recorded ? kCudaSuccess : Driver().cuStreamSynchronize(stream);
  if (!recorded && code == kCudaSuccess) return Give(memory);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    Push(recorded ? pending_ : lost_, memory);
    if (recorded) {
      stats_.in_use_bytes -= memory->capacity;
      stats_.pending_bytes += memory->capacity;
    }
  }
  Driver().Check(code, "cuStreamSynchronize");
}

/// Records the block's event on the stream; false if that fails. A block keeps its
/// event, but an event can't be recorded in another context, so there it gets a new
/// one.
bool PinnedPool::Record(PinnedMemory& memory, CudaStream stream) const {
  try {
    ScopedContext current(stream);
    if (memory.event_context != current.context()) DestroyEvent(memory);
    if (memory.event == nullptr) {
      Driver().Check(Driver().cuEventCreate(&memory.event, kCudaEventDisableTiming),
                     "cuEventCreate");
      memory.event_context = current.context();
    }
    return Driver().cuEventRecord(memory.event, stream) == kCudaSuccess;
  } catch (const CudaError&) {
    return false;  // the caller waits for the stream instead, and reports its error
  }
}

// --- The whole ------------------------------------------------------------------

/// Destroys a block's event, in the context in which it was made.
void PinnedPool::DestroyEvent(PinnedMemory& memory) const noexcept {
  if (memory.event == nullptr) return;
  try {
    ScopedContext current(memory.event_context);
    Driver().cuEventDestroy_v2(memory.event);
  } catch (const CudaError&) {  // the context is gone, and its events with it
  }
  memory.event = nullptr;
  memory.event_context = nullptr;
}

/// Returns a block to the system. Called without the lock.
void PinnedPool::Free(PinnedMemory* memory) const noexcept {
  const std::unique_ptr<PinnedMemory> doomed(memory);
  DestroyEvent(*memory);
  try {
    ScopedContext current(memory->context);
    Driver().cuMemFreeHost(memory->data);
  } catch (const CudaError&) {  // the context is gone, and its memory with it
  }
}

void PinnedPool::set_limit(size_t bytes) {
  Lock lock(mutex_);
  stats_.limit = bytes;
  // A request that waits for a block looks again. If it has the turn it evicts,
  // too.
  ++returns_;
  changed_.notify_all();
  Turn turn(*this, lock, false);
  if (!turn) return;
  Collect(lock);
  Evict(lock, stats_.limit);
}

PinnedPool::Stats PinnedPool::stats() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return stats_;
}

}  // namespace hostcall
