#pragma once

namespace hostcall {

/// Base of what is neither copied nor moved: guards, and owners of what others
/// point to.
struct NoCopy {
  NoCopy() = default;
  NoCopy(const NoCopy&) = delete;
  NoCopy& operator=(const NoCopy&) = delete;
};

}  // namespace hostcall
