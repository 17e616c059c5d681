#include "handlers/tap_filter.h"

#include <algorithm>
#include <vector>

namespace hostcall {

bool IsWanted(const Plan& plan, int device) {
  const std::vector<int>& only = plan.tap->only;
  return only.empty() || std::find(only.begin(), only.end(), device) != only.end();
}

bool IsMasked(const Plan& plan, const void* const* operands) {
  // A mask with several rows is queued with the values, and the worker applies it.
  if (!plan.masked || plan.mask_rows != 1) return false;
  if (*static_cast<const bool*>(operands[0])) return false;
  plan.counts->masked.fetch_add(1, std::memory_order_relaxed);
  return true;
}

bool IsSkipped(const Plan& plan, Throttle* throttle, int device, int64_t run,
               const void* const* operands) {
  // The throttle is asked first, so that it counts the execution in any case.
  if (throttle == nullptr || throttle->Lets(device, run)) return false;
  if (plan.tap->always && *static_cast<const bool*>(operands[plan.operands()])) {
    return false;
  }
  plan.counts->skipped.fetch_add(1, std::memory_order_relaxed);
  return true;
}

}  // namespace hostcall
