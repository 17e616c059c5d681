#pragma once

namespace hostcall {

/// Base of what is neither copied nor moved: guards, and owners of what others
/// point to.
struct NoCopy {
  NoCopy() = default;
  NoCopy(const NoCopy&) = delete;
  NoCopy& operator=(const NoCopy&) = delete;
};

/// The process's one T. Never destroyed: threads of XLA and of the CUDA driver may
/// use it while static objects are destroyed.
template <typename T>
T& Immortal() {
  static T* const object = new T;
  return *object;
}

}  // namespace hostcall
