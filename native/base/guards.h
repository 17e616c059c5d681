// Guards: each does one thing, and undoes it when it goes.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <unistd.h>

#include <cassert>
#include <chrono>
#include <cstdint>
#include <utility>
#if defined(__GLIBCXX__)
#include <cxxabi.h>
#endif

#include "base/clock.h"

namespace hostcall {

/// Keeps the calling thread for ever; the kernel ends it with the process.
[[noreturn]] inline void StayForEver() {
  for (;;) pause();
}

/// Runs what may wait for the GIL, or run Python code. If Python ends the thread
/// there, the thread stays in here for ever instead.
///
/// While the interpreter finalizes, CPython up to 3.13 ends a daemon thread that
/// asks for the GIL by pthread_exit, which glibc carries out as an exception
/// through all its frames. Ours would let go of Python objects without the GIL, and
/// XLA's and nanobind's do not expect an exception: std::terminate would end the
/// process. So each way into Python catches it in the innermost frame of ours and
/// never leaves the handler. CPython 3.14 does the same. Costs nothing where
/// nothing is thrown.
template <typename Function>
inline auto OrPark(Function function) -> decltype(function()) {
#if defined(__GLIBCXX__)
  try {
    return function();
  } catch (const abi::__forced_unwind&) {
    StayForEver();
  }
#else
  return function();
#endif
}

/// PyObject_Vectorcall. The GIL is held.
inline PyObject* CallPython(PyObject* function, PyObject* const* args, size_t n,
                            PyObject* keywords) {
  return OrPark([&] { return PyObject_Vectorcall(function, args, n, keywords); });
}

/// Owns one reference to a Python object. The GIL is held wherever one is made
/// non-null, copied or destroyed.
class Ref {
 public:
  Ref() = default;
  /// Takes over a reference that the caller owns (may be null).
  static Ref Steal(PyObject* object) { return Ref(object); }
  /// Adds a reference to a borrowed object (may be null).
  static Ref Borrow(PyObject* object) {
    Py_XINCREF(object);
    return Ref(object);
  }
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  Ref(const Ref&) = delete;
  Ref& operator=(const Ref&) = delete;
  ~Ref() {  // what dies may run Python code
    OrPark([this] { Py_XDECREF(object_); });
  }

  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  explicit Ref(PyObject* object) : object_(object) {}
  PyObject* object_ = nullptr;
};

/// Whether the calling thread holds the GIL.
///
/// PyGILState_Check answers that only while the process has never had a
/// sub-interpreter; from then on it says yes to everybody.
inline bool HoldsGil() {
#if PY_VERSION_HEX >= 0x030D0000
  return PyThreadState_GetUnchecked() != nullptr;
#elif PY_VERSION_HEX >= 0x030C0000
  return _PyThreadState_UncheckedGet() != nullptr;
#else  // one current state for the process: nobody but its own thread sets it
  PyThreadState* mine = PyGILState_GetThisThreadState();
  return mine != nullptr && _PyThreadState_UncheckedGet() == mine;
#endif
}

/// Of the few thread-locals that each call reads. glibc keeps some room in its
/// static block for libraries that are opened late, where reading one is a load,
/// and else the call of a function.
#if defined(__GLIBC__)
#define HOSTCALL_HOT thread_local __attribute__((tls_model("initial-exec")))
#else
#define HOSTCALL_HOT thread_local
#endif

/// The state that the engine made for a thread that Python does not know, or null.
extern HOSTCALL_HOT PyThreadState* t_made_state;

/// Attaches the calling thread to the interpreter for the guard's life: the one way
/// into Python from handlers.
///
/// A thread that Python does not know (one of XLA's) gets its thread state at its
/// first call and keeps it: making one a call costs 0.2 us, keeping it 0.05. The
/// state is never freed before the interpreter is: the thread that dies cannot free
/// it without the GIL, for which it could wait for ever (its joiner may hold it),
/// and from 3.12 on another thread that frees it would unbind its own. XLA's
/// threads live as long as their client, so what is kept is bounded.
class GilGuard {
 public:
  GilGuard() : held_before_(HoldsGil()) {
    if (held_before_) return;
    PyThreadState* state = t_made_state;
    if (state == nullptr) state = PyGILState_GetThisThreadState();
    if (state == nullptr) {
      state = t_made_state = PyThreadState_New(PyInterpreterState_Main());
      made_ = true;
    }
    OrPark([state] { PyEval_RestoreThread(state); });
    assert(HoldsGil());
  }
  ~GilGuard() {
    assert(HoldsGil());
    if (!held_before_) PyEval_SaveThread();
  }
  GilGuard(const GilGuard&) = delete;
  GilGuard& operator=(const GilGuard&) = delete;

  /// True on the call that gave this thread its thread state.
  bool first_on_foreign_thread() const { return made_; }

 private:
  const bool held_before_;
  bool made_ = false;
};

/// Floating point as Python code knows it, for the guard's life. XLA runs programs
/// on CPUs with the smallest numbers flushed to zero, on its threads and on the one
/// that dispatches; a host function would give other values there than it gives
/// alone.
class PlainFloats {
 public:
  PlainFloats() : before_(Get()) {
    if ((before_ & kFlush) != 0) Set(before_ & ~kFlush);
  }
  ~PlainFloats() {
    if ((before_ & kFlush) != 0) Set(before_);
  }
  PlainFloats(const PlainFloats&) = delete;
  PlainFloats& operator=(const PlainFloats&) = delete;

 private:
#if defined(__x86_64__)
  using Word = uint32_t;
  static constexpr Word kFlush = 0x8040;  // of results, and of operands
  static Word Get() { return __builtin_ia32_stmxcsr(); }
  static void Set(Word word) { __builtin_ia32_ldmxcsr(word); }
#elif defined(__aarch64__)
  using Word = uint64_t;
  static constexpr Word kFlush = Word{1} << 24;
  static Word Get() {
    Word word;
    asm volatile("mrs %0, fpcr" : "=r"(word));
    return word;
  }
  static void Set(Word word) { asm volatile("msr fpcr, %0" : : "r"(word)); }
#else
  using Word = uint32_t;
  static constexpr Word kFlush = 0;
  static Word Get() { return 0; }
  static void Set(Word) {}
#endif
  const Word before_;
};

/// Lets other Python threads run for the guard's life, if this thread holds the
/// GIL.
class GilRelease {
 public:
  explicit GilRelease(bool release = true)
      : state_(release && HoldsGil() ? PyEval_SaveThread() : nullptr) {}
  ~GilRelease() {
    if (state_ == nullptr) return;
    OrPark([this] { PyEval_RestoreThread(state_); });
    assert(HoldsGil());
  }
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

 private:
  PyThreadState* state_;
};

}  // namespace hostcall
