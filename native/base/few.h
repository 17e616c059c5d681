// An array that is on the stack if it is short.
#pragma once

#include <cstddef>
#include <memory>

#include "base/no_copy.h"

namespace hostcall {

/// `n` values, which are not set: at most kFew in this object, more on the heap.
template <typename T, size_t kFew>
class Few : NoCopy {
 public:
  explicit Few(size_t n) : more_(n > kFew ? new T[n] : nullptr) {}
  T* data() { return more_ ? more_.get() : few_; }

 private:
  T few_[kFew];
  std::unique_ptr<T[]> more_;
};

}  // namespace hostcall
