// In place of modules.cc where no kernel is launched: in XLA's CPU runtime, and in
// the tests of the driver itself.
#include "kernels.h"

namespace fakegpu {

int KernelOp(Lock& lock, const KernelLaunch&, Op&) {
  return Missing(lock, "a kernel");
}

}  // namespace fakegpu

EXPORT int cuLaunchKernel(void*, unsigned, unsigned, unsigned, unsigned, unsigned,
                          unsigned, unsigned, CUstream_st*, void**, void**) {
  ENTER();
  return Missing(lock, "a kernel");
}
