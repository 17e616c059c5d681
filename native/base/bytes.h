// Copies of memory whose size is known only at run time.
//
// An array without elements may have no address, and memcpy and memset must not get
// a null pointer even for no bytes: the compiler may then take the pointer for
// valid from there on. So every such copy of the engine is one of these.
#pragma once

#include <cstddef>
#include <cstring>

namespace hostcall {

/// Copies `n` bytes; does nothing for none. The two don't overlap.
inline void CopyBytes(void* to, const void* from, size_t n) {
  if (n != 0) std::memcpy(to, from, n);
}

/// Sets `n` bytes to a value; does nothing for none.
inline void FillBytes(void* to, int value, size_t n) {
  if (n != 0) std::memset(to, value, n);
}

}  // namespace hostcall
