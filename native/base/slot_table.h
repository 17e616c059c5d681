// The names by which compiled programs know their callbacks, and the counted
// objects behind the names.
//
// Does not depend on Python, so that ThreadSanitizer can watch it alone
// (tests/native/slot_table_test.cc).
//
// Guarantees
//   * A key and a count name one entry from Add to Remove. The caller chooses the
//     key, which says what the entry is; Add returns the smallest free count among
//     the entries with that key. So a program's text does not depend on what else
//     was lowered, and JAX's compilation cache hits.
//   * Find returns a counted pointer: the object outlives the caller's use, even if
//     another thread calls Remove meanwhile.
//   * Objects may lose their last pointer on any thread, also on one that must not
//     wait for the GIL, yet they are destroyed only where the GIL is held: inside
//     Graveyard::Bury, or in ReleaseHere and DropHere.
//
// The race that the counting settles:
//
//   1. thread A: XLA instantiates the program; Find copies the pointer
//   2. thread B: the program's Python handle dies; Remove drops the table's pointer
//   3. thread A: runs the callback through its own copy
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/no_copy.h"

namespace hostcall {

/// An object with a reference count, born with a count of one. When Release brings
/// the count to zero, the object goes to the graveyard instead of being destroyed.
///
/// The count has a cache line to itself: devices change it with every tap, while
/// the worker reads the members that follow. Sharing a line made a tap 0.05 us
/// slower.
class alignas(64) RefCounted {
 public:
  virtual ~RefCounted() = default;
  /// Adds a reference. Relaxed: the caller already holds one (or knows that
  /// somebody does), so the object can't die meanwhile, and nothing is read by
  /// this.
  void Retain() { count_.fetch_add(1, std::memory_order_relaxed); }
  /// Drops `times` references. The object may be gone when this returns.
  void Release(int64_t times = 1);
  /// Drops a reference where the object may be destroyed at once: for a plan, with
  /// the GIL. Asking somebody to bury it takes 20 us, since that thread and this
  /// one then want the GIL.
  void ReleaseHere() {
    // The order is Release's.
    if (count_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }

 private:
  friend class Graveyard;
  std::atomic<int64_t> count_{1};
  /// The next in the graveyard; used only when dead.
  RefCounted* next_dead_ = nullptr;
  [[maybe_unused]] char
      rest_of_the_line_[64 - sizeof(void*) - sizeof(count_) - sizeof(next_dead_)];
};

/// The objects that nobody references any more. They wait for a thread that may
/// destroy them: a plan holds Python objects, and destroying it takes the GIL.
///
/// A stack, linked through the objects. Push takes no lock and allocates nothing,
/// since it runs on any thread that drops a pointer, maybe while a lane of the tap
/// queue is locked. Bury takes the whole stack at once; no single object is ever
/// popped, so the stack has no ABA problem.
class Graveyard {
 public:
  static Graveyard& Get() { return Immortal<Graveyard>(); }
  /// Sets a function that gets somebody to bury. Push calls it on any thread, when
  /// nobody has been asked since the last Bury; it must not wait. Without it, the
  /// dead wait for the next thread that calls Bury for reasons of its own.
  void AskBy(void (*ask)()) { ask_.store(ask, std::memory_order_relaxed); }
  /// Takes an object whose count is zero.
  void Push(RefCounted* dead) {
    RefCounted* head = head_.load(std::memory_order_relaxed);
    do {
      dead->next_dead_ = head;
      // Release: Bury sees next_dead_, and all that was done to the object before.
      // Acquire: a push that comes after Bury's exchange sees asked_ reset (there).
    } while (!head_.compare_exchange_weak(head, dead, std::memory_order_acq_rel,
                                          std::memory_order_relaxed));
    auto* ask = ask_.load(std::memory_order_relaxed);
    // Relaxed, as below: head_ orders it. The exchange only lets one pusher ask.
    if (ask != nullptr && !asked_.exchange(true, std::memory_order_relaxed)) ask();
  }
  /// Destroys what has been pushed. The caller holds the GIL if there may be plans.
  void Bury() {
    // An empty stack does not suffice for an early return. asked_ would stay true,
    // and later pushes would ask nobody:
    //   1. pusher: pushes
    //   2. another burier: resets asked_, takes the stack
    //   3. pusher: sets asked_, and asks this burier
    //   4. this burier: finds the stack empty
    const bool asked = asked_.load(std::memory_order_relaxed);
    if (!asked && head_.load(std::memory_order_relaxed) == nullptr) return;
    // Before the stack is taken. In the other order a push could be forgotten:
    //   1. burier: takes the stack
    //   2. pusher: pushes, finds asked_ still true, and asks nobody
    //   3. burier: resets asked_
    // Program order alone does not forbid that: asked_ and head_ are two variables.
    // The exchange of head_ releases, and a push acquires. So a push either comes
    // before the exchange, which takes its object, or reads what the exchange (or a
    // push after it) wrote, and then sees asked_ reset, and asks.
    asked_.store(false, std::memory_order_relaxed);
    RefCounted* dead = head_.exchange(nullptr, std::memory_order_acq_rel);
    while (dead != nullptr) {
      RefCounted* next = dead->next_dead_;
      delete dead;
      dead = next;
    }
  }

 private:
  std::atomic<RefCounted*> head_{nullptr};  ///< last pushed; null if empty
  /// AskBy's; null before. Relaxed: a function needs nothing that was written for
  /// it.
  std::atomic<void (*)()> ask_{nullptr};
  std::atomic<bool> asked_{false};  ///< Push need not ask again
};

inline void RefCounted::Release(int64_t times) {
  // Release, so that this thread's use of the object comes before its destruction;
  // acquire, so that the thread that drops the last reference has seen all uses.
  if (count_.fetch_sub(times, std::memory_order_acq_rel) == times) {
    Graveyard::Get().Push(this);
  }
}

/// Owns one reference to a RefCounted, or is null. Like std::shared_ptr, different
/// pointers to one object may be used by different threads; one pointer may not.
template <typename T>
class RefPtr {
 public:
  RefPtr() = default;
  /// Takes over a reference: the one that `object` was born with, or the caller's.
  static RefPtr Adopt(T* object) { return RefPtr(object); }
  RefPtr(const RefPtr& other) : object_(other.object_) {
    if (object_ != nullptr) object_->Retain();
  }
  RefPtr(RefPtr&& other) noexcept : object_(other.object_) {
    other.object_ = nullptr;
  }
  RefPtr& operator=(RefPtr other) noexcept {
    T* own_object = object_;
    object_ = other.object_;
    other.object_ = own_object;
    return *this;
  }
  ~RefPtr() {
    if (object_ != nullptr) object_->Release();
  }
  /// Drops the reference as RefCounted::ReleaseHere does.
  void DropHere() {
    if (object_ != nullptr) std::exchange(object_, nullptr)->ReleaseHere();
  }
  T* get() const { return object_; }
  T* operator->() const { return object_; }
  T& operator*() const { return *object_; }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  explicit RefPtr(T* object) : object_(object) {}
  T* object_ = nullptr;
};

/// Maps names to counted pointers. Counts begin at 1; 0 names nothing.
///
/// Used when a program is lowered, instantiated or dropped, and never when it runs.
template <typename T>
class SlotTable {
 public:
  /// In a lasting table, a name that Find has returned an entry for is never given
  /// again. Programs over several processes use one: JAX may keep their
  /// executables, with the names, for the life of the process.
  explicit SlotTable(bool lasting = false) : lasting_(lasting) {}

  /// Puts an object under a key, with the smallest free count, and returns the
  /// count.
  uint64_t Add(uint64_t key, RefPtr<T> object) {
    std::lock_guard<std::mutex> lock(mutex_);
    ++live_;
    Equals& equals = equals_[key];
    std::vector<Entry>& entries = equals.entries;
    ++equals.used;
    size_t i = equals.first_free;
    while (i < entries.size() && !IsFree(entries[i])) ++i;
    if (i == entries.size()) entries.emplace_back();
    entries[i].object = std::move(object);
    equals.first_free = i + 1;
    return i + 1;
  }

  /// The entry with this name; null if there is none.
  RefPtr<T> Find(uint64_t key, uint64_t count) {
    std::lock_guard<std::mutex> lock(mutex_);
    Entry* entry = EntryOf(key, count);
    if (entry == nullptr || !entry->object) return {};
    entry->found = true;
    return entry->object;
  }

  /// Drops the table's reference, if there is one, and frees the name.
  void Remove(uint64_t key, uint64_t count) {
    // Declared before the lock, so destroyed after it: dropping the last reference
    // calls the graveyard's ask function, which should not run under this lock.
    RefPtr<T> doomed;
    std::lock_guard<std::mutex> lock(mutex_);
    Entry* entry = EntryOf(key, count);
    if (entry == nullptr || !entry->object) return;
    doomed = std::move(entry->object);
    entry->object = {};
    --live_;
    if (!IsFree(*entry)) return;
    Equals& equals = equals_.at(key);
    if (count - 1 < equals.first_free) equals.first_free = count - 1;
    if (--equals.used == 0) equals_.erase(key);
  }

  /// Entries in the table.
  size_t live() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return live_;
  }

 private:
  struct Entry {
    RefPtr<T> object;    ///< null after Remove
    bool found = false;  ///< whether Find has ever returned this entry
  };
  /// What has the same key.
  struct Equals {
    std::vector<Entry> entries;  ///< count n is at n - 1; never shrinks
    size_t first_free = 0;       ///< no count before this index is free
    size_t used = 0;             ///< entries that are not free
  };
  /// Whether Add may give the name. The lock is held.
  bool IsFree(const Entry& entry) const {
    return !entry.object && !(lasting_ && entry.found);
  }
  /// The entry with this name, maybe without an object, or null. The lock is held.
  Entry* EntryOf(uint64_t key, uint64_t count) {
    const auto equals = equals_.find(key);
    if (equals == equals_.end() || count == 0) return nullptr;
    std::vector<Entry>& entries = equals->second.entries;
    return count <= entries.size() ? &entries[count - 1] : nullptr;
  }

  const bool lasting_;
  // Guards the fields below. Its parties are threads that lower programs, XLA's
  // threads that instantiate them, and threads that drop them; some hold the GIL
  // meanwhile, so nothing under this lock may ask for it. No running program takes
  // it, so a finer scheme is not needed.
  mutable std::mutex mutex_;
  std::unordered_map<uint64_t, Equals> equals_;  ///< by key; none is all free
  size_t live_ = 0;                              ///< entries with an object
};

}  // namespace hostcall
