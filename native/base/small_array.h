// An array that is on the stack if it is short.
#pragma once

#include <cstddef>
#include <memory>

#include "base/no_copy.h"

namespace hostcall {

/// `size` values, which are not set: up to kInline of them in this object, more on
/// the heap.
template <typename T, size_t kInline>
class SmallArray : NoCopy {
 public:
  explicit SmallArray(size_t size)
      : heap_(size > kInline ? new T[size] : nullptr) {}
  T* data() { return heap_ ? heap_.get() : inline_; }

 private:
  T inline_[kInline];
  std::unique_ptr<T[]> heap_;  ///< null if the values are in `inline_`
};

}  // namespace hostcall
