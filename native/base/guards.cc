#include "base/guards.h"

#include "base/detached.h"

namespace hostcall {

HOSTCALL_HOT PyThreadState* t_made_state = nullptr;

Detached::Detached() : state_(HoldsGil() ? PyEval_SaveThread() : nullptr) {}

Detached::~Detached() {
  if (state_ == nullptr) return;
  OrPark([this] { PyEval_RestoreThread(static_cast<PyThreadState*>(state_)); });
  assert(HoldsGil());
}

}  // namespace hostcall
