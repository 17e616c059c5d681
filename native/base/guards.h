// Guards around calls into Python: each does one thing, and its destructor undoes
// it.
//
// Which thread may do what: XLA's threads enter Python only through GilGuard; code
// that holds the GIL releases it with GilRelease before it waits for anything that
// another thread has to do.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <unistd.h>

#include <cassert>
#include <cstdint>
#include <utility>
#if defined(__GLIBCXX__)
#include <cxxabi.h>
#endif

#include "base/gil_release.h"
#include "base/no_copy.h"

namespace hostcall {

/// Never returns. The kernel ends the thread with the process.
[[noreturn]] inline void StayForEver() {
  for (;;) pause();
}

/// Runs a function that may wait for the GIL, or run Python code. If Python ends
/// the thread in there, the thread parks here for ever instead.
///
/// While the interpreter finalizes, CPython up to 3.13 ends a daemon thread that
/// asks for the GIL by pthread_exit, which glibc implements as an exception through
/// all frames of the thread. The engine's frames would release Python objects
/// without the GIL, and those of XLA and nanobind do not expect an exception:
/// std::terminate would end the process. So each way into Python catches the
/// exception in the engine's innermost frame, and the thread never leaves the
/// handler. CPython 3.14 parks such threads itself. The try block costs nothing if
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

/// PyObject_Vectorcall, parked as above. The GIL is held. Returns a new reference,
/// or null with a Python error set.
inline PyObject* CallPython(PyObject* function, PyObject* const* args, size_t n,
                            PyObject* keywords) {
  return OrPark([&] { return PyObject_Vectorcall(function, args, n, keywords); });
}

/// Owns one reference to a Python object, or is null. The GIL is held wherever a
/// non-null Ref is made, copied or destroyed; moving one and reading one need no
/// GIL.
class Ref {
 public:
  Ref() = default;
  /// Takes over a reference that the caller owns; may be null.
  static Ref Steal(PyObject* object) { return Ref(object); }
  /// Adds a reference to a borrowed object; may be null.
  static Ref Borrow(PyObject* object) {
    Py_XINCREF(object);
    return Ref(object);
  }
  Ref(const Ref& other) : Ref(Borrow(other.object_)) {}
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Ref() {  // the object may die, and its finalizer may run Python code
    OrPark([this] { Py_XDECREF(object_); });
  }

  PyObject* get() const { return object_; }  ///< borrowed
  /// Gives the reference to the caller.
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  explicit Ref(PyObject* object) : object_(object) {}
  PyObject* object_ = nullptr;
};

inline PyObject* Borrowed(PyObject* object) { return object; }
inline PyObject* Borrowed(const Ref& object) { return object.get(); }

/// function(*arguments), each a Ref or a borrowed object. Null with a Python error
/// set, which may be the one that made an argument null.
template <typename... Arguments>
Ref Call(PyObject* function, const Arguments&... arguments) {
  if ((... || (Borrowed(arguments) == nullptr))) return Ref();
  // The place in front is for `self`, should this be a bound method.
  PyObject* stack[] = {nullptr, Borrowed(arguments)...};
  constexpr size_t n = sizeof...(arguments) | PY_VECTORCALL_ARGUMENTS_OFFSET;
  return Ref::Steal(CallPython(function, stack + 1, n, nullptr));
}

/// The same for a method, by its name.
template <typename... Arguments>
Ref CallMethod(const Ref& object, const char* method,
               const Arguments&... arguments) {
  if ((... || (Borrowed(arguments) == nullptr))) return Ref();
  const Ref bound = Ref::Steal(PyObject_GetAttrString(object.get(), method));
  return bound ? Call(bound.get(), arguments...) : Ref();
}

/// What the engine has from Python.
enum class Hook {
  kAdmitsLate,  ///< () -> whether the closed engine makes a call (module.cc)
  kEndedError,  ///< raised when something of a call is used after its end
  kPending,   ///< (sign, is_hidden): the thread's newest program may not have ended
  kProfiled,  ///< () -> whether JAX takes a profile (profile.h)
  kReport,    ///< (error) -> what is raised in its place, or None (report.h)
  kShown,     ///< (hooks, tap, waited) -> what a profile shows (profile.h)
  kStage,     ///< ExecutionStage.EXECUTE
  kStreamError,  ///< raised for `stream` on a CPU, as JAX does
  kTextReader,   ///< (text, on_cuda, buffers) -> a plan, or None (plan_state.cc)
  kTracing,      ///< () -> (trace, profile), what `threading` gives new threads
};
/// Set when hostcall is imported or the engine starts, and kept for ever. Null
/// before. Read and written with the GIL.
inline PyObject* g_hooks[10] = {};
inline PyObject* HookOf(Hook hook) { return g_hooks[static_cast<int>(hook)]; }
/// Calls it. Null with a Python error set.
template <typename... Arguments>
Ref CallHook(Hook hook, const Arguments&... arguments) {
  return Call(HookOf(hook), arguments...);
}

/// Whether the calling thread holds the GIL.
///
/// PyGILState_Check can't be used: once the process has had a sub-interpreter, it
/// returns true on every thread.
inline bool HoldsGil() {
#if PY_VERSION_HEX >= 0x030D0000
  return PyThreadState_GetUnchecked() != nullptr;
#elif PY_VERSION_HEX >= 0x030C0000
  return _PyThreadState_UncheckedGet() != nullptr;
#else
  // Before 3.12 the current state is one variable of the process. It may change
  // while it is read, but only the calling thread can set it to the calling
  // thread's state.
  PyThreadState* mine = PyGILState_GetThisThreadState();
  return mine != nullptr && _PyThreadState_UncheckedGet() == mine;
#endif
}

/// Declares one of the few thread-local variables that each call reads. In a
/// library that is opened late, reading a thread-local is normally a function call.
/// glibc keeps some room in its static block for such libraries, and reading one
/// there is a plain load. The room is small, so only these variables use it.
#if defined(__GLIBC__)
#define HOSTCALL_HOT thread_local __attribute__((tls_model("initial-exec")))
#else
#define HOSTCALL_HOT thread_local
#endif

/// The thread state that the engine made for the calling thread; null if Python
/// knows the thread, or it has not called yet.
extern HOSTCALL_HOT PyThreadState* t_made_state;

/// Gives the calling thread the trace and profile functions that `threading` gives
/// each thread that it starts. So debuggers and coverage tools see callbacks on
/// XLA's threads. The GIL is held; no Python error is set afterwards.
void TakeOverTracing();

/// Attaches the calling thread to the interpreter for the guard's life. The only
/// way into Python from a handler.
///
/// A thread that Python does not know (one of XLA's) gets a thread state at its
/// first call and keeps it: attaching then costs 0.05 us, instead of 0.2 us with a
/// new state for each call. The state lives as long as the interpreter:
///   * the dying thread can't free it without the GIL, and may never get the GIL:
///     the thread that joins it may hold it;
///   * another thread can't free it from CPython 3.12 on: it would unbind its own
///     state.
/// XLA's threads live as long as their client, so the number of states is bounded.
///
/// Because the state is kept, a trace function is taken over once a thread, and
/// later calls pay nothing for it. A function that is set later reaches the thread
/// through threading.settrace_all_threads (CPython 3.12), which goes through all
/// states.
class GilGuard : NoCopy {
 public:
  GilGuard() : held_before_(HoldsGil()) {
    if (held_before_) return;
    PyThreadState* state = t_made_state;
    if (state == nullptr) state = PyGILState_GetThisThreadState();
    if (state == nullptr) {
      state = PyThreadState_New(PyInterpreterState_Main());
      t_made_state = state;
      made_ = true;
    }
    OrPark([state] { PyEval_RestoreThread(state); });
    assert(HoldsGil());
    if (made_) TakeOverTracing();
  }
  ~GilGuard() {
    assert(HoldsGil());
    if (!held_before_) PyEval_SaveThread();
  }

 private:
  const bool held_before_;  ///< the caller held the GIL already: nothing to undo
  bool made_ = false;
};

/// Restores floating point as Python code expects it, for the guard's life. XLA
/// runs CPU programs with denormal numbers flushed to zero, on its own threads and
/// on the dispatching one. Without this guard, a host function would return other
/// values inside a program than outside.
class PlainFloats : NoCopy {
 public:
  PlainFloats() : before_(Get()) {
    if ((before_ & kFlush) != 0) Set(before_ & ~kFlush);
  }
  ~PlainFloats() {
    if ((before_ & kFlush) != 0) Set(before_);
  }

 private:
#if defined(__x86_64__)
  using Word = uint32_t;
  static constexpr Word kFlush = 0x8040;  // FTZ (results) and DAZ (operands)
  static Word Get() { return __builtin_ia32_stmxcsr(); }
  static void Set(Word word) { __builtin_ia32_ldmxcsr(word); }
#elif defined(__aarch64__)
  using Word = uint64_t;
  static constexpr Word kFlush = Word{1} << 24;  // FZ
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

}  // namespace hostcall
