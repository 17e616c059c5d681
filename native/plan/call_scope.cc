#include "plan/call_scope.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/engine.h"

namespace hostcall {
namespace {

/// The calling thread's innermost call, or null.
HOSTCALL_HOT ActiveCall* t_current = nullptr;
// On threads that Python did not start, the settings of the last outermost call
// stay set: only calls run Python code there, and the next call mostly has the same
// settings. These are that call's; borrowed, and only compared, or used as values
// while they are set.
HOSTCALL_HOT PyObject* t_device = nullptr;
HOSTCALL_HOT PyObject* t_guard = nullptr;        // the guard, or the scout
HOSTCALL_HOT PyObject* t_plain_guard = nullptr;  // the guard, never the scout
/// Whether Python did not start the calling thread.
HOSTCALL_HOT bool t_foreign = false;
/// The last run that found the calling thread without meshes. Between the calls of
/// one run, nothing else runs on the thread that could set one, so it is not asked
/// again.
HOSTCALL_HOT int64_t t_run_without_mesh = -1;
/// The newest call under way, or null. Guarded by the GIL.
ActiveCall* g_calls = nullptr;

/// One of JAX's settings, as AddAmbientSetting got it.
struct Setting {
  Ambient kind;
  PyObject* self;
  PyObject* swap;  // methods of the class: a bound method would cost one more call
  PyObject* set;
  PyObject* get;
  PyObject* value;
  PyObject* unset;
};
constexpr size_t kMaxAmbient = 4;
Setting g_ambient[kMaxAmbient];
size_t g_ambient_count = 0;

}  // namespace

ActiveCall* CurrentCall() { return t_current; }
ActiveCall* AllCalls() { return g_calls; }
namespace {

/// Raises KeyboardInterrupt once on each thread with a wanted call, and returns
/// their number. The list has the newest call first, so the first one of a thread
/// is its innermost, which is where Python code runs.
template <typename Wanted>
int Interrupt(Wanted wanted) {
  std::vector<unsigned long> done;
  for (ActiveCall* call = g_calls; call != nullptr; call = call->next) {
    if (!wanted(*call)) continue;
    if (std::find(done.begin(), done.end(), call->thread_id) != done.end())
      continue;
    PyThreadState_SetAsyncExc(call->thread_id, PyExc_KeyboardInterrupt);
    call->interrupted = true;
    done.push_back(call->thread_id);
  }
  return static_cast<int>(done.size());
}

}  // namespace

int InterruptForeignCalls(bool taps) {
  return Interrupt([taps](const ActiveCall& call) {
    return call.tap != nullptr ? taps : call.foreign;
  });
}
int InterruptTaps() {
  return Interrupt([](const ActiveCall& call) { return call.tap != nullptr; });
}
bool OnlyOnThreads(const std::vector<unsigned long>& threads) {
  int64_t there = 0;
  for (ActiveCall* call = g_calls; call != nullptr; call = call->next) {
    if (!call->counted) continue;
    there += std::count(threads.begin(), threads.end(), call->thread_id) != 0;
  }
  return there == Engine::Get().in_flight();
}
void ForgetCallsAfterFork() {
  g_calls = nullptr;
  t_current = nullptr;
}

void AddAmbientSetting(Ambient kind, PyObject* self, PyObject* swap, PyObject* set,
                       PyObject* get, PyObject* value, PyObject* unset) {
  if (g_ambient_count == kMaxAmbient) return;
  for (PyObject* kept : {self, swap, set, get, value, unset}) Py_XINCREF(kept);
  g_ambient[g_ambient_count++] = {kind, self, swap, set, get, value, unset};
}

CallScope::CallScope(const Plan& plan, int device_ordinal, int64_t run,
                     Lookout lookout) {
  call_.plan = &plan;
  call_.run = run;
  call_.device_ordinal = device_ordinal;
  call_.thread_id = PyThread_get_thread_ident();
  call_.foreign = t_foreign;
  call_.outer = t_current;
  t_current = &call_;
  call_.next = g_calls;
  if (g_calls != nullptr) g_calls->prev = &call_;
  g_calls = &call_;
  // An outermost call on XLA's thread does not restore the settings (see t_device).
  const bool stays = t_foreign && call_.outer == nullptr;
  PyObject* guard =
      lookout == Lookout::kScout ? plan.scout.get() : plan.guard.get();
  if (stays) {
    t_plain_guard = plan.guard.get();
    if (t_device == plan.device.get() && t_guard == guard) return;
    t_device = plan.device.get();
    if (std::exchange(t_guard, guard) != nullptr && guard == nullptr) {
      guard = Py_False;  // removes the guard that the last call left
    }
  } else if (lookout == Lookout::kInside && guard == nullptr &&
             t_guard != nullptr) {
    // The thread may have the scout of an enclosing call set: back to its guard.
    guard = t_plain_guard != nullptr ? t_plain_guard : Py_False;
  }
  // Most threads have no meshes. Asking costs half as much as setting, and is done
  // once for each run.
  bool meshes = run == -1 || t_run_without_mesh != run;
  for (size_t i = 0; i < g_ambient_count; ++i) {
    const Setting& setting = g_ambient[i];
    const bool fixed =
        setting.kind == Ambient::kFixed || setting.kind == Ambient::kWith;
    PyObject* value = fixed                              ? setting.value
                      : setting.kind == Ambient::kDevice ? plan.device.get()
                                                         : guard;
    if (value == nullptr) continue;
    if (fixed && plan.keeps_mesh) continue;
    if (fixed && !stays) {
      if (!meshes) continue;
      PyObject* stack[] = {setting.self};
      Ref now = Ref::Steal(CallPython(setting.get, stack, 1, nullptr));
      if (!now) PyErr_Clear();
      if (now.get() == setting.unset) {
        if (setting.kind == Ambient::kFixed) {  // then kWith is not set either
          meshes = false;
          t_run_without_mesh = run;
        }
        continue;
      }
    }
    PyObject* stack[] = {setting.self, value};
    Ref before = Ref::Steal(CallPython(setting.swap, stack, 2, nullptr));
    // The call goes on with the setting as it was: better than no call.
    if (!before) PyErr_WriteUnraisable(setting.swap);
    if (!stays) saved_[i] = std::move(before);
  }
}

CallScope::~CallScope() {
  // A failed call leaves its Python error set, which the calls below must not
  // disturb.
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  const bool failed = PyErr_Occurred() != nullptr;
  if (failed) PyErr_Fetch(&type, &value, &trace);
  for (size_t i = g_ambient_count; i-- > 0;) {
    if (!saved_[i]) continue;
    PyObject* stack[] = {g_ambient[i].self, saved_[i].get()};
    Ref done = Ref::Steal(CallPython(g_ambient[i].set, stack, 2, nullptr));
    if (!done) PyErr_WriteUnraisable(g_ambient[i].set);
  }
  if (failed) PyErr_Restore(type, value, trace);
  // An interrupt that came too late must not hit the next call of this thread.
  if (call_.interrupted) PyThreadState_SetAsyncExc(call_.thread_id, nullptr);
  t_current = call_.outer;
  if (call_.prev != nullptr) call_.prev->next = call_.next;
  if (call_.next != nullptr) call_.next->prev = call_.prev;
  if (g_calls == &call_) g_calls = call_.next;
}

void MarkForeignThread() { t_foreign = true; }
bool OnForeignThread() { return t_foreign; }

}  // namespace hostcall
