#include "plan/call_scope.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/engine.h"

namespace hostcall {
namespace {

HOSTCALL_HOT ActiveCall* t_current = nullptr;
// On threads that Python did not start, the settings of the last outermost call
// stay.
HOSTCALL_HOT PyObject* t_device = nullptr;
HOSTCALL_HOT PyObject* t_guard = nullptr;
HOSTCALL_HOT PyObject* t_plain_guard = nullptr;  // without the scout's part
HOSTCALL_HOT bool t_foreign = false;
// The newest run of a program that found the thread without meshes: between its
// calls nothing else runs on the thread that could set one.
HOSTCALL_HOT int64_t t_run_without_mesh = -1;
ActiveCall* g_calls = nullptr;  // guarded by the GIL

struct Setting {
  Ambient kind;
  PyObject* self;
  PyObject* swap;  // methods of its class: bound ones cost a call more each
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

/// Newest first, so the first of a thread is its innermost, where Python is.
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
  const bool stays = t_foreign && call_.outer == nullptr;
  PyObject* guard =
      lookout == Lookout::kScout ? plan.scout.get() : plan.guard.get();
  if (stays) {
    t_plain_guard = plan.guard.get();
    if (t_device == plan.device.get() && t_guard == guard) return;
    t_device = plan.device.get();
    if (std::exchange(t_guard, guard) != nullptr && guard == nullptr) {
      guard = Py_False;  // what the thread has must go
    }
  } else if (lookout == Lookout::kInside && guard == nullptr &&
             t_guard != nullptr) {
    guard = t_plain_guard != nullptr ? t_plain_guard : Py_False;
  }
  // Most threads have no meshes; asking is half the price of setting, and is done
  // once a run.
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
        if (setting.kind == Ambient::kFixed) {  // so neither is what goes with it
          meshes = false;
          t_run_without_mesh = run;
        }
        continue;
      }
    }
    PyObject* stack[] = {setting.self, value};
    Ref before = Ref::Steal(CallPython(setting.swap, stack, 2, nullptr));
    if (!before) PyErr_WriteUnraisable(setting.swap);
    if (!stays) saved_[i] = std::move(before);
  }
}

CallScope::~CallScope() {
  // A failing call leaves its error set; putting back must not disturb it.
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
  // One that came too late must not hit the next call of this thread.
  if (call_.interrupted) PyThreadState_SetAsyncExc(call_.thread_id, nullptr);
  t_current = call_.outer;
  if (call_.prev != nullptr) call_.prev->next = call_.next;
  if (call_.next != nullptr) call_.next->prev = call_.prev;
  if (g_calls == &call_) g_calls = call_.next;
}

void MarkForeignThread() { t_foreign = true; }
bool OnForeignThread() { return t_foreign; }

}  // namespace hostcall
