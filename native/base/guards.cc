#include "base/guards.h"

#include <atomic>

#include "base/free_threads.h"

namespace hostcall {

HOSTCALL_HOT PyThreadState* t_made_state = nullptr;
HOSTCALL_HOT unsigned t_group = 0;

unsigned NewGroup() {
  static std::atomic<unsigned> next{0};
  t_group = next.fetch_add(1, std::memory_order_relaxed) % kGroups + 1;
  return t_group;
}

void* GilRelease::Release() { return HoldsGil() ? PyEval_SaveThread() : nullptr; }

void GilRelease::Restore(void* state) {
  OrPark([state] { PyEval_RestoreThread(static_cast<PyThreadState*>(state)); });
  assert(HoldsGil());
}

}  // namespace hostcall
