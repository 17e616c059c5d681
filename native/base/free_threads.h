// What stands in for the GIL on a Python without one (3.14t, 3.15t). Where there
// is a GIL, all of this compiles to nothing, or to the plain operation.
//
// What the GIL guards, and what guards it without one:
//
// - calls under way (call_scope.h): an AttachedMutex for each group of threads
// - statistics of calls (plan.h): Tally, a part for each group of threads
// - spare arrays (arrays.h): Spare, taken and kept by one atomic operation
// - "nobody else holds this object": IsSole, for objects that this thread made;
//   Merge, IsHeldElsewhere and DropIfLast, for those that any thread may hold
// - Buffers (buffer_object.h): Lease, no view begins after the end of the call
// - objects of the process: set once, when the module is imported
//
// Everything else has locks or atomics of its own, since devices come without the
// GIL. docs/design/threads.md has the rules and the reasons.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/guards.h"
#include "base/no_copy.h"

namespace hostcall {

#ifdef Py_GIL_DISABLED
// Merge and DropIfLast write an object's reference counts as the interpreter does.
// That is no part of Python's interface. Before a newer version is let in, compare
// them with its Include/refcount.h and Objects/object.c
// (_Py_MergeZeroLocalRefcount).
static_assert(PY_VERSION_HEX >= 0x030D0000 && PY_VERSION_HEX < 0x03100000,
              "hostcall knows how Python 3.13t to 3.15t count references");
inline constexpr bool kFreeThreads = true;
#else
inline constexpr bool kFreeThreads = false;
#endif

/// A mutex for what the GIL guards where there is one. The calling thread is
/// attached, and holds it for a few instructions.
///
/// The holder may call what waits for a lock of the interpreter. So the wait for
/// this mutex is detached (PyMutex). With a std::mutex:
///
///   1. collector:    stops the world: waits for all attached threads
///   2. the holder:   waits for the interpreter's lock, detached, and can't attach
///                    before the world goes on
///   3. third thread: waits for the holder, attached; the collector waits for it
class AttachedMutex {
 public:
#ifdef Py_GIL_DISABLED
  void lock() { PyMutex_Lock(&mutex_); }
  void unlock() { PyMutex_Unlock(&mutex_); }

 private:
  PyMutex mutex_ = {0};
#else
  void lock() {}
  void unlock() {}
#endif
};

/// Groups of threads that have data of their own, so that calls on several threads
/// do not write to one cache line.
inline constexpr size_t kGroups = kFreeThreads ? 16 : 1;
/// The calling thread's, plus 1; 0: none yet.
extern HOSTCALL_HOT unsigned t_group;
/// Gives the calling thread a group; returns it plus 1.
unsigned NewGroup();
/// The calling thread's group.
inline size_t Group() {
  if (!kFreeThreads) return 0;
  const unsigned group = t_group;
  return (group != 0 ? group : NewGroup()) - 1;
}

/// A count that attached threads change, and any thread may read. What a thread did
/// before it added comes before what the reader of the sum does next: additions
/// release, each also what those before it released, and a reading acquires.
class Tally {
 public:
  void Add(int64_t n) {
    if (kFreeThreads) {
      value_.fetch_add(n, std::memory_order_release);
    } else {  // a plain addition: the GIL is held, and orders everything
      value_.store(value() + n, std::memory_order_relaxed);
    }
  }
  int64_t value() const {
    return value_.load(kFreeThreads ? std::memory_order_acquire
                                    : std::memory_order_relaxed);
  }

 private:
  std::atomic<int64_t> value_{0};
};

/// Whether the caller's reference is the only one. Without a GIL, false for an
/// object that another thread made: its count has two halves, and the maker may
/// change one while the other is read.
inline bool IsSole(PyObject* object) {
#if defined(Py_GIL_DISABLED) && PY_VERSION_HEX >= 0x030E0000
  const bool sole = PyUnstable_Object_IsUniquelyReferenced(object) != 0;
  std::atomic_thread_fence(std::memory_order_acquire);  // as in IsHeldElsewhere
  return sole;
#elif defined(Py_GIL_DISABLED)
  return false;
#else
  return Py_REFCNT(object) == 1;
#endif
}

/// Gives a new object, to which only the caller has a reference, one atomic count
/// in place of two halves, as the interpreter does when an object's thread has
/// ended. IsHeldElsewhere is then exact, whichever threads hold the object.
inline void Merge(PyObject* object) {
#ifdef Py_GIL_DISABLED
  object->ob_tid = 0;
  object->ob_ref_local = 0;
  object->ob_ref_shared = _Py_REF_SHARED(1, _Py_REF_MERGED);
#else
  (void)object;
#endif
}

/// Whether anybody but the caller holds a merged object. If not, what they did with
/// its memory comes before this.
inline bool IsHeldElsewhere(PyObject* object) {
  const bool is_held = Py_REFCNT(object) > 1;
  // Pairs with the release of the last decrement; Py_REFCNT is relaxed.
  if (kFreeThreads) std::atomic_thread_fence(std::memory_order_acquire);
  return is_held;
}

/// Drops the caller's reference to a merged object, if it is the last one. Only
/// this tells that nobody can reach the object any more: a weak reference may
/// become a strong one at any time after its references were counted, but not after
/// the last one has gone.
inline bool DropIfLast(PyObject* object) {
#ifdef Py_GIL_DISABLED
  Py_ssize_t last = _Py_REF_SHARED(1, _Py_REF_MERGED);
  // What the interpreter does for the last reference, unless another one appears.
  if (!__atomic_compare_exchange_n(&object->ob_ref_shared, &last, _Py_REF_MERGED,
                                   false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) {
    return false;
  }
  OrPark([object] { _Py_Dealloc(object); });
#else
  if (Py_REFCNT(object) != 1) return false;
  OrPark([object] { Py_DECREF(object); });
#endif
  return true;
}

/// An object that is kept from one call for the next, or nothing. Several threads
/// may make the call: one gets the object, the others find nothing. Keep releases
/// and Take acquires, so what the last call did with the object comes before what
/// the next one does. A first look is relaxed: it only says that there is nothing
/// to do.
class Spare : NoCopy {
 public:
  ~Spare() { (void)Take(); }

  /// Takes the object, so that a nested call can't take it too; null if there is
  /// none.
  Ref Take() {
    PyObject* object = object_.load(std::memory_order_relaxed);
    if (object == nullptr) return Ref();
    if (kFreeThreads) {
      object = object_.exchange(nullptr, std::memory_order_acquire);
    } else {
      object_.store(nullptr, std::memory_order_relaxed);
    }
    return Ref::Steal(object);
  }
  /// Keeps an object that nobody else holds; drops it if there is one already.
  void Keep(Ref object) {
    PyObject* present = object_.load(std::memory_order_relaxed);
    if (present != nullptr) return;
    if (!kFreeThreads) {
      object_.store(object.release(), std::memory_order_relaxed);
    } else if (object_.compare_exchange_strong(present, object.get(),
                                               std::memory_order_release,
                                               std::memory_order_relaxed)) {
      (void)object.release();
    }
  }

 private:
  std::atomic<PyObject*> object_{nullptr};  ///< owned
};

}  // namespace hostcall
