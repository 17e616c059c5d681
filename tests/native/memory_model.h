// Runs a program of a few threads in every way that C++ allows, with the engine's
// own code: what native/ names std::atomic, std::mutex and std::condition_variable
// below this header are the model's.
//
// A machine shows few of the ways: x86 reorders little, and a test that races for
// an hour may miss the one that loses a wake-up. Here all are tried: which thread
// goes next, which of the values a load may return, where a store comes among the
// others to its place. That is C++20's model without values out of thin air:
// coherence, happens-before with release sequences, and one order of all
// sequentially consistent operations, which a few of its axioms bind.
//
// Found is
//   * a data race: the compiler tells each plain access (-fsanitize=thread, without
//     the sanitizer's library);
//   * a thread that waits for ever;
//   * what the program checks.
//
// And each order is tried in a weaker form. A program tells how many of its orders
// it needs: for these, the weaker form must be found wrong. So an order that is
// weakened in native/ fails the test, and one that needs not be so strong shows.
//
// Bounds. A thread that comes to `most` operations, as in a loop that tries again,
// is not followed further. A wait with a limit may end at any time (or never:
// LimitsEnd), and no wait ends without a reason. Fences are not modelled.
#pragma once

#undef NDEBUG
// What native/ includes comes first, with its own names.
#include <algorithm>
#include <array>
#include <atomic>
#include <cassert>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iterator>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

namespace model {

/// One program, made anew for each way.
struct Program {
  virtual ~Program() = default;
  /// The code of each thread.
  virtual void Thread(int number) = 0;
  /// Looks at what they have done, when all have ended.
  virtual void After() {}
  /// Whether a wait with a limit may end by it.
  virtual bool LimitsEnd() const { return true; }
  /// Whether only the one order of sequentially consistent operations is broken: a
  /// large program whose other promises smaller ones try.
  virtual bool IsOfOneOrder() const { return false; }
};

/// Fails the way that runs now, unless `ok`.
void Check(bool ok, const char* what);

/// Tries a program of so many threads in all ways, and then again with each promise
/// of an order broken; so many, `needed`, must be found wrong. (An acquire and a
/// release are a promise each. A sequentially consistent operation promises both,
/// and its place in the one order.) Ends the process if something is not so.
void Try(const char* name, Program* (*make)(), int threads, int needed,
         int most = 1000);
template <typename T>
void Try(const char* name, int threads, int needed, int most = 1000) {
  Try(name, []() -> Program* { return new T; }, threads, needed, most);
}

// --- What stands in for the standard library's.

/// An operation in native/: its order may be weakened there.
struct Site {
  static Site Here(const char* file = __builtin_FILE(),
                   int line = __builtin_LINE()) {
    return {file, line};
  }
  const char* file;
  int line;
};
/// The value that an operation writes in place of `old`; false if it only reads.
using Change = std::function<bool(uint64_t old, uint64_t* now)>;

/// Reads, and writes what `change` says. `first` is the value that the place has
/// before it is first written. Returns what was read.
uint64_t Update(const void* at, uint64_t first, std::memory_order writing,
                std::memory_order reading, const Change& change, Site site);
void Store(const void* at, uint64_t first, uint64_t value, std::memory_order order,
           Site site);
/// The place is another object's now.
void Forget(const void* at);

template <typename T>
class Atomic {
  static constexpr auto kTotal = std::memory_order_seq_cst;

 public:
  Atomic(T value = T()) : first_(Bits(value)) { Forget(this); }
  Atomic(const Atomic&) = delete;
  Atomic& operator=(const Atomic&) = delete;

  T load(std::memory_order order = kTotal, Site site = Site::Here()) const {
    return Changed(order, order, [](T, T*) { return false; }, site);
  }
  void store(T value, std::memory_order order = kTotal, Site site = Site::Here()) {
    Store(this, first_, Bits(value), order, site);
  }
  T exchange(T value, std::memory_order order = kTotal, Site site = Site::Here()) {
    return Always(order, [value](T) { return value; }, site);
  }
  T fetch_add(T n, std::memory_order order = kTotal, Site site = Site::Here()) {
    return Always(order, [n](T old) { return static_cast<T>(old + n); }, site);
  }
  T fetch_sub(T n, std::memory_order order = kTotal, Site site = Site::Here()) {
    return Always(order, [n](T old) { return static_cast<T>(old - n); }, site);
  }
  T fetch_or(T n, std::memory_order order = kTotal, Site site = Site::Here()) {
    return Always(order, [n](T old) { return static_cast<T>(old | n); }, site);
  }
  bool compare_exchange_strong(T& expected, T value,
                               std::memory_order order = kTotal,
                               Site site = Site::Here()) {
    const bool releases = order == std::memory_order_release;
    const bool both = order == std::memory_order_acq_rel;
    return compare_exchange_strong(expected, value, order,
                                   releases ? std::memory_order_relaxed
                                   : both   ? std::memory_order_acquire
                                            : order,
                                   site);
  }
  bool compare_exchange_strong(T& expected, T value, std::memory_order writing,
                               std::memory_order reading,
                               Site site = Site::Here()) {
    const T wanted = expected;
    expected = Changed(
        writing, reading,
        [=](T old, T* now) { return old == wanted && (*now = value, true); }, site);
    return expected == wanted;
  }
  bool compare_exchange_weak(T& expected, T value, std::memory_order order = kTotal,
                             Site site = Site::Here()) {
    return compare_exchange_strong(expected, value, order, site);
  }
  bool compare_exchange_weak(T& expected, T value, std::memory_order writing,
                             std::memory_order reading, Site site = Site::Here()) {
    return compare_exchange_strong(expected, value, writing, reading, site);
  }
  operator T() const { return load(); }
  T operator=(T value) { return store(value), value; }
  T operator++() { return fetch_add(1) + 1; }

 private:
  static uint64_t Bits(T value) {
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    return bits;
  }
  static T Of(uint64_t bits) {
    T value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
  template <typename F>
  T Changed(std::memory_order writing, std::memory_order reading, const F& change,
            Site site) const {
    const auto on_bits = [&change](uint64_t old, uint64_t* now) {
      T made = T();
      const bool writes = change(Of(old), &made);
      *now = Bits(made);
      return writes;
    };
    return Of(Update(this, first_, writing, reading, on_bits, site));
  }
  template <typename F>
  T Always(std::memory_order order, const F& change, Site site) {
    return Changed(
        order, order, [&](T old, T* now) { return *now = change(old), true; },
        site);
  }
  const uint64_t first_;
};

class Mutex {
 public:
  Mutex() { Forget(this); }
  void lock();
  void unlock();
};

class Condition {
 public:
  Condition() { Forget(this); }
  void notify_all();
  void notify_one() { notify_all(); }
  template <typename There>
  void wait(std::unique_lock<Mutex>& lock, There there) {
    while (!there()) Wait(lock, false);
  }
  template <typename Time>
  void wait_for(std::unique_lock<Mutex>& lock, Time) {
    Wait(lock, true);
  }
  template <typename Time, typename There>
  bool wait_for(std::unique_lock<Mutex>& lock, Time, There there) {
    while (!there()) {
      if (!Wait(lock, true)) return there();
    }
    return true;
  }

 private:
  /// False if the time is over.
  bool Wait(std::unique_lock<Mutex>& lock, bool limited);
};

/// In place of base/semaphore.h. A wait has no limit here: what it would find then
/// is no reason for a thread to go on.
class ModelSemaphore {
 public:
  ModelSemaphore() { Forget(this); }
  void Post();
  bool Wait(double);
};

}  // namespace model

namespace std {
template <typename T>
using model_atomic = model::Atomic<T>;
using model_mutex = model::Mutex;
using model_condition_variable = model::Condition;
}  // namespace std
#define atomic model_atomic
#define mutex model_mutex
#define condition_variable model_condition_variable
