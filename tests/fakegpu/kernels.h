// Launches of kernels, on streams and in graphs.
#pragma once

#include "world.h"

struct CUfunc_st;

namespace fakegpu {

struct KernelLaunch {
  CUfunc_st* function;
  unsigned grid[3], block[3];
  unsigned shared_bytes;
  void** params;
};

/// The work of a launch, with the values that its arguments have now. Returns an
/// error for a kernel that can't be run, which is counted.
int KernelOp(Lock& lock, const KernelLaunch& launch, Op& op);

}  // namespace fakegpu
