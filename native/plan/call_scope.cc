#include "plan/call_scope.h"

#include <algorithm>
#include <new>
#include <utility>

#include "base/engine.h"

namespace hostcall {

std::array<CallList, kGroups> g_calls;

namespace {

/// The calling thread's innermost call, or null.
HOSTCALL_HOT ActiveCall* t_current = nullptr;
// On threads that Python did not start, the settings of the last outermost call
// stay set: only callbacks run Python code there, and the next call mostly needs
// the same settings. These two remember them, so that such a call makes no call
// into JAX. They are borrowed: JAX's thread-local setting holds a reference while
// it has this value, so the address can't come to name another object.
HOSTCALL_HOT PyObject* t_device = nullptr;
HOSTCALL_HOT PyObject* t_guard = nullptr;
/// The last run that found the calling thread without meshes. Between the calls of
/// one run, nothing else on the thread could set one, so later calls do not ask.
HOSTCALL_HOT int64_t t_run_without_mesh = -1;

constexpr size_t kMaxAmbient = 4;  // CallScope::saved_ has as many places
// Settings are added once, when the engine starts.
AmbientSetting g_ambient[kMaxAmbient];
size_t g_ambient_count = 0;

/// For an error of Python code before the function, which the call can't raise. An
/// interrupt comes to this thread again, in the function.
void NotRaised(PyObject* where) {
  if (!PyErr_ExceptionMatches(PyExc_KeyboardInterrupt)) {
    PyErr_WriteUnraisable(where);
    return;
  }
  PyErr_Clear();
  PyThreadState_SetAsyncExc(PyThread_get_thread_ident(), PyExc_KeyboardInterrupt);
}

}  // namespace

ActiveCall* CurrentCall() { return t_current; }

int InterruptCalls(bool calls, bool taps) {
  // Once on each thread. Its first call is its innermost, where Python code runs.
  std::vector<unsigned long> done;
  ForEachCall([&](ActiveCall& call) {
    if (call.tap != nullptr ? !taps : !(calls && call.foreign)) return;
    if (std::find(done.begin(), done.end(), call.thread_id) != done.end()) return;
    // CPython raises it when the thread next runs bytecode. If the call ends before
    // that, ~CallScope takes it back; it waits for the mutex that is held here.
    PyThreadState_SetAsyncExc(call.thread_id, PyExc_KeyboardInterrupt);
    call.interrupted = true;
    done.push_back(call.thread_id);
  });
  return static_cast<int>(done.size());
}
bool OnlyOnThreads(const std::vector<unsigned long>& threads) {
  std::vector<std::unique_lock<AttachedMutex>> locks;
  int64_t on_threads = 0;
  for (CallList& list : g_calls) {
    locks.emplace_back(list.mutex);
    for (ActiveCall* call = list.newest; call != nullptr; call = call->next) {
      if (!call->counted) continue;
      on_threads +=
          std::count(threads.begin(), threads.end(), call->thread_id) != 0;
    }
  }
  return on_threads == Engine::Get().in_flight();
}
void StayIfLeftBehind() {
  if (!Engine::Get().IsLeftBehind()) return;
  GilRelease unlocked;
  StayForEver();
}
void ForgetCallsAfterFork() {
  // New lists: a thread of the parent may have held a mutex.
  for (CallList& list : g_calls) new (&list) CallList();
  // The calls of this thread that go on leave lists that are empty now. The stacks
  // of other threads, to which they are linked, may get new owners.
  for (ActiveCall* call = t_current; call != nullptr; call = call->outer) {
    call->prev = call->next = nullptr;
  }
  t_current = nullptr;  // the calling thread is the only one in the child
}

void AddAmbientSetting(const AmbientSetting& setting) {
  // A start that was interrupted is made again.
  for (size_t i = 0; i < g_ambient_count; ++i) {
    if (g_ambient[i].self == setting.self) return;
  }
  if (g_ambient_count == kMaxAmbient) return;
  for (PyObject* object : {setting.self, setting.swap, setting.set, setting.get,
                           setting.value, setting.unset}) {
    Py_XINCREF(object);
  }
  g_ambient[g_ambient_count++] = setting;
}

bool AskInside() {
  for (ActiveCall* call = t_current; call != nullptr && !call->inside;
       call = call->outer) {
    if (call->scouts) return call->asked = true;
  }
  return false;
}

CallScope::CallScope(ActiveCall& call) : call_(call) {
  const Plan& plan = *call.plan;
  const int64_t run = call.run;
  call_.thread_id = PyThread_get_thread_ident();
  call_.foreign = OnForeignThread();
  call_.outer = t_current;
  t_current = &call_;
  {
    CallList& list = g_calls[Group()];
    const std::lock_guard<AttachedMutex> lock(list.mutex);
    call_.next = list.newest;
    if (list.newest != nullptr) list.newest->prev = &call_;
    list.newest = &call_;
  }
  if (plan.enter) {
    entered_ = Call(plan.enter.get());
    if (!entered_) NotRaised(plan.enter.get());
  }
  // Whether the settings stay set after the call (see t_device).
  const bool stays = call_.foreign && call_.outer == nullptr;
  // A guard that only scouts has nothing to do in other calls, and would take JAX's
  // programs off their fast path there.
  PyObject* guard = plan.team || call_.scouts ? plan.guard.get() : nullptr;
  if (stays) {
    if (t_device == plan.device.get() && t_guard == guard) return;
    t_device = plan.device.get();
    if (std::exchange(t_guard, guard) != nullptr && guard == nullptr) {
      guard = Py_False;  // removes the guard that the last call left
    }
  }
  // Most threads have no meshes to hide. Asking costs half as much as setting, so
  // it is asked first, and only once for each run.
  bool meshes = run == -1 || t_run_without_mesh != run;
  for (size_t i = 0; i < g_ambient_count; ++i) {
    const AmbientSetting& setting = g_ambient[i];
    const bool fixed =
        setting.kind == Ambient::kFixed || setting.kind == Ambient::kWith;
    PyObject* value = setting.value;
    if (setting.kind == Ambient::kDevice) value = plan.device.get();
    if (setting.kind == Ambient::kGuard) value = guard;
    if (value == nullptr) continue;
    if (fixed && plan.keeps_mesh) continue;
    if (fixed && !stays) {
      if (!meshes) continue;
      const Ref now = Call(setting.get, setting.self);
      if (!now) PyErr_Clear();
      if (now.get() == setting.unset) {
        if (setting.kind == Ambient::kFixed) {  // then kWith is unset too
          meshes = false;
          t_run_without_mesh = run;
        }
        continue;
      }
    }
    Ref before = Call(setting.swap, setting.self, value);
    // If it fails, the call goes on with the setting as it was, which is better
    // than no call.
    if (!before) NotRaised(setting.swap);
    if (!stays) saved_[i] = std::move(before);
  }
}

CallScope::~CallScope() {
  // If the call failed, its Python error is set. Python code may not run with an
  // error set, so it is put aside meanwhile.
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  const bool failed = PyErr_Occurred() != nullptr;
  if (failed) PyErr_Fetch(&type, &value, &trace);
  for (size_t i = g_ambient_count; i-- > 0;) {
    if (!saved_[i]) continue;  // was left alone, or stays set
    const AmbientSetting& setting = g_ambient[i];
    if (!Call(setting.set, setting.self, saved_[i])) {
      PyErr_WriteUnraisable(setting.set);
    }
  }
  if (entered_ && !Call(call_.plan->leave.get(), entered_)) {
    PyErr_WriteUnraisable(call_.plan->leave.get());
  }
  if (failed) PyErr_Restore(type, value, trace);
  t_current = call_.outer;
  CallList& list = g_calls[Group()];
  const std::lock_guard<AttachedMutex> lock(list.mutex);
  // An interrupt that the function was too fast for must not hit the thread's next
  // Python code.
  if (call_.interrupted) PyThreadState_SetAsyncExc(call_.thread_id, nullptr);
  if (call_.prev != nullptr) call_.prev->next = call_.next;
  if (call_.next != nullptr) call_.next->prev = call_.prev;
  if (list.newest == &call_) list.newest = call_.next;
}

}  // namespace hostcall
