// The numbers that compiled programs know callbacks by.
//
// Knows no Python, so that ThreadSanitizer can watch it alone
// (tests/native/slot_table_test.cc).
//
// Guarantees
//   * A number names one entry from Add to Remove. The smallest free number is
//     given next, so that two processes that lower the same programs in the same
//     order write the same program text, and JAX's compilation cache hits.
//   * Find returns a counted pointer: what it points to outlives the caller's use
//     even when Remove runs in another thread in between.
//   * The last pointer may die on any thread, also one that must not touch Python.
//     So dying means "pushed on the graveyard"; whoever next holds the GIL buries.
//
// The race that the counting settles:
//   1. thread A: the program is instantiated, Find(7) copies the pointer
//   2. thread B: the program's Python handle dies, Remove(7) drops the table's
//   3. thread A: runs the callback through its own copy
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

namespace hostcall {

/// An object with a count. Dying puts it on the graveyard. The count has a line of
/// the cache to itself: devices change it while the worker reads what follows.
class alignas(64) Mortal {
 public:
  virtual ~Mortal() = default;
  void Retain() { count_.fetch_add(1, std::memory_order_relaxed); }
  void Release(int64_t times = 1);

 private:
  friend class Graveyard;
  std::atomic<int64_t> count_{1};
  Mortal* next_dead_ = nullptr;
  char rest_of_the_line_[64 - sizeof(void*) - sizeof(count_) - sizeof(next_dead_)];
};

/// Where the dead wait for a thread that may destroy them. Push takes no lock and
/// does not allocate.
class Graveyard {
 public:
  static Graveyard& Get() {
    static Graveyard* graveyard = new Graveyard;  // outlives static destruction
    return *graveyard;
  }
  /// `ask` is called, on any thread, when there is something to bury, and sees to
  /// it that somebody does. Without it the dead wait for whoever comes.
  void AskBy(void (*ask)()) { ask_.store(ask); }
  void Push(Mortal* dead) {
    Mortal* head = head_.load(std::memory_order_relaxed);
    do {
      dead->next_dead_ = head;
    } while (!head_.compare_exchange_weak(head, dead, std::memory_order_release,
                                          std::memory_order_relaxed));
    auto* ask = ask_.load(std::memory_order_relaxed);
    if (ask != nullptr && !asked_.exchange(true)) ask();
  }
  /// Destroys what has been pushed. For plans the caller holds the GIL.
  void Bury() {
    if (head_.load(std::memory_order_relaxed) == nullptr) return;
    asked_.store(false);  // first: who pushes from here on asks again
    Mortal* dead = head_.exchange(nullptr, std::memory_order_acquire);
    while (dead != nullptr) {
      Mortal* next = dead->next_dead_;
      delete dead;
      dead = next;
    }
  }

 private:
  std::atomic<Mortal*> head_{nullptr};
  std::atomic<void (*)()> ask_{nullptr};
  std::atomic<bool> asked_{false};
};

inline void Mortal::Release(int64_t times) {
  if (count_.fetch_sub(times, std::memory_order_acq_rel) == times) {
    Graveyard::Get().Push(this);
  }
}

/// Counted pointer to a Mortal.
template <typename T>
class Counted {
 public:
  Counted() = default;
  /// Takes over the count that `object` was born with, or that the caller holds.
  static Counted Adopt(T* object) { return Counted(object); }
  Counted(const Counted& other) : object_(other.object_) {
    if (object_ != nullptr) object_->Retain();
  }
  Counted(Counted&& other) noexcept : object_(other.object_) {
    other.object_ = nullptr;
  }
  Counted& operator=(Counted other) noexcept {
    T* mine = object_;
    object_ = other.object_;
    other.object_ = mine;
    return *this;
  }
  ~Counted() {
    if (object_ != nullptr) object_->Release();
  }
  T* get() const { return object_; }
  T* operator->() const { return object_; }
  T& operator*() const { return *object_; }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  explicit Counted(T* object) : object_(object) {}
  T* object_ = nullptr;
};

/// number -> counted pointer. Touched when a program is lowered, instantiated and
/// dropped, never when it runs: one mutex is enough.
template <typename T>
class SlotTable {
 public:
  explicit SlotTable(bool lasting = false) : lasting_(lasting) {}

  uint64_t Add(Counted<T> object) {
    std::lock_guard<std::mutex> lock(mutex_);
    ++live_;
    for (size_t i = first_free_; i < entries_.size(); ++i) {
      if (IsFree(entries_[i])) {
        entries_[i].object = std::move(object);
        first_free_ = i + 1;
        return i + 1;
      }
    }
    entries_.push_back({std::move(object)});
    first_free_ = entries_.size();
    return entries_.size();
  }

  /// Null where no entry has this number.
  Counted<T> Find(uint64_t number) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (number == 0 || number > entries_.size()) return {};
    Entry& entry = entries_[number - 1];
    entry.found |= static_cast<bool>(entry.object);
    return entry.object;
  }

  void Remove(uint64_t number) {
    Counted<T> doomed;  // dies after the lock is gone
    std::lock_guard<std::mutex> lock(mutex_);
    if (number == 0 || number > entries_.size()) return;
    Entry& entry = entries_[number - 1];
    if (!entry.object) return;
    doomed = std::move(entry.object);
    entry.object = {};
    --live_;
    if (IsFree(entry) && number - 1 < first_free_) first_free_ = number - 1;
  }

  size_t live() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return live_;
  }

 private:
  struct Entry {
    Counted<T> object;
    bool found = false;
  };
  bool IsFree(const Entry& entry) const {
    return !entry.object && !(lasting_ && entry.found);
  }

  const bool lasting_;
  mutable std::mutex mutex_;
  std::vector<Entry> entries_;
  size_t first_free_ = 0;
  size_t live_ = 0;
};

}  // namespace hostcall
