// CUDA's virtual memory management (VMM): ranges of addresses are reserved, pieces
// of a device's memory are made, and a piece is mapped into a range. Only what is
// mapped and accessible is a device's memory for copies and kernels.
//
// The host's shared memory does it: `mremap` of a length of 0 maps the same pages a
// second time, so a piece that is mapped twice has one content.
#include <sys/mman.h>

#include <cstring>

#include "world.h"

namespace {

using namespace fakegpu;

/// Sizes are multiples of it. A GPU has 2 MiB, up to whose end no one would see
/// that a kernel leaves its array.
constexpr size_t kGranularity = 256;
constexpr size_t kPage = 4096;

using Handle = unsigned long long;
struct Physical {
  size_t size;
  int device;
  char* data;
};
struct Mapping {
  size_t size;
  int device;
};
struct VirtualMemory {
  std::map<char*, size_t> reserved;
  std::map<Handle, Physical> pieces;
  std::map<char*, Mapping> mapped;
  Handle last = 0;
};
/// Guarded by the lock of the world.
VirtualMemory& Memory(Lock&) {
  static auto* const memory = new VirtualMemory;
  return *memory;
}

size_t WholePages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

/// CUmemAllocationProp and CUmemAccessDesc, of which the device is read.
struct AllocationProperties {
  int type, handle_types, location_kind, device;
};
struct Access {
  int location_kind, device, flags;
};
constexpr int kReadAndWrite = 3;

/// Whether one range that was reserved has all of these addresses.
bool IsReserved(Lock& lock, char* at, size_t bytes) {
  const auto& reserved = Memory(lock).reserved;
  auto found = reserved.upper_bound(at);
  if (found == reserved.begin()) return false;
  --found;
  const auto offset = static_cast<size_t>(at - found->first);
  return offset <= found->second && bytes <= found->second - offset;
}
bool IsMapped(Lock& lock, const char* at, size_t bytes) {
  for (const auto& [begin, mapping] : Memory(lock).mapped)
    if (begin < at + bytes && at < begin + mapping.size) return true;
  return false;
}

}  // namespace

EXPORT int cuMemGetAllocationGranularity(size_t* bytes, const void*, int) {
  return *bytes = kGranularity, kSuccess;
}

EXPORT int cuMemAddressReserve(Address* address, size_t bytes, size_t alignment,
                               Address, unsigned long long) {
  ENTER();
  if (bytes == 0 || bytes % kGranularity != 0) return kInvalidValue;
  const size_t beside = alignment > kPage ? alignment : 0;
  const size_t length = WholePages(bytes) + beside;
  void* const found = mmap(nullptr, length, PROT_NONE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED) return kOutOfMemory;
  auto* begin = static_cast<char*>(found);
  if (beside != 0) {
    const size_t past = reinterpret_cast<Address>(begin) % alignment;
    char* const aligned = begin + (past != 0 ? alignment - past : 0);
    if (aligned != begin) munmap(begin, static_cast<size_t>(aligned - begin));
    char* const end = aligned + WholePages(bytes);
    if (end != begin + length)
      munmap(end, static_cast<size_t>(begin + length - end));
    begin = aligned;
  }
  Memory(lock).reserved[begin] = bytes;
  return *address = reinterpret_cast<Address>(begin), kSuccess;
}
EXPORT int cuMemAddressFree(Address address, size_t bytes) {
  ENTER();
  auto* const begin = static_cast<char*>(Pointer(address));
  auto& reserved = Memory(lock).reserved;
  const auto found = reserved.find(begin);
  if (found == reserved.end() || found->second != bytes)
    return Fault(lock, "addresses are freed that were not reserved", kInvalidValue);
  if (IsMapped(lock, begin, bytes))
    return Fault(lock, "addresses are freed that memory is mapped to",
                 kInvalidValue);
  reserved.erase(found);
  munmap(begin, WholePages(bytes));
  return kSuccess;
}

EXPORT int cuMemCreate(Handle* handle, size_t bytes,
                       const AllocationProperties* properties, unsigned long long) {
  ENTER();
  if (bytes == 0 || bytes % kGranularity != 0) return kInvalidValue;
  if (!HasSpace(lock, bytes, properties->device)) return kOutOfMemory;
  void* const data = mmap(nullptr, WholePages(bytes), PROT_READ | PROT_WRITE,
                          MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return kOutOfMemory;
  std::memset(data, 0xcd, bytes);
  VirtualMemory& memory = Memory(lock);
  *handle = ++memory.last;
  memory.pieces[*handle] =
      Physical{bytes, properties->device, static_cast<char*>(data)};
  return kSuccess;
}
/// What is mapped stays until it is unmapped.
EXPORT int cuMemRelease(Handle handle) {
  ENTER();
  const auto piece = Memory(lock).pieces.extract(handle);
  if (piece.empty())
    return Fault(lock, "memory is released that is not there", kInvalidValue);
  munmap(piece.mapped().data, WholePages(piece.mapped().size));
  return kSuccess;
}

EXPORT int cuMemMap(Address address, size_t bytes, size_t offset, Handle handle,
                    unsigned long long) {
  ENTER();
  auto* const at = static_cast<char*>(Pointer(address));
  const auto piece = Memory(lock).pieces.find(handle);
  if (piece == Memory(lock).pieces.end())
    return Fault(lock, "memory is mapped that is not there", kInvalidValue);
  if (!IsReserved(lock, at, bytes) || IsMapped(lock, at, bytes))
    return Fault(lock, "memory is mapped to addresses that are not free",
                 kInvalidValue);
  if (offset != 0 || bytes != piece->second.size || address % kPage != 0)
    return kInvalidValue;
  void* const mapped = mremap(piece->second.data, 0, WholePages(bytes),
                              MREMAP_MAYMOVE | MREMAP_FIXED, at);
  if (mapped == MAP_FAILED) return kOutOfMemory;
  Memory(lock).mapped[at] = Mapping{bytes, piece->second.device};
  return kSuccess;
}
EXPORT int cuMemSetAccess(Address address, size_t bytes, const Access* accesses,
                          size_t count) {
  ENTER();
  auto* const at = static_cast<char*>(Pointer(address));
  const auto found = Memory(lock).mapped.find(at);
  if (found == Memory(lock).mapped.end() || found->second.size != bytes)
    return Fault(lock, "access to memory that is not mapped", kInvalidValue);
  for (size_t i = 0; i < count; ++i) {
    if (accesses[i].device != found->second.device) continue;  // no peer reads it
    if (accesses[i].flags != kReadAndWrite) return kNotSupported;
    W().device[at] = Block{bytes, found->second.device, !xlas, true};
    W().has_device_memory = true;
  }
  return kSuccess;
}
/// Does not wait for work that uses the memory, as the real one does not. That work
/// then uses memory that no block has.
EXPORT int cuMemUnmap(Address address, size_t bytes) {
  ENTER();
  auto* const at = static_cast<char*>(Pointer(address));
  const auto found = Memory(lock).mapped.find(at);
  if (found == Memory(lock).mapped.end() || found->second.size != bytes)
    return Fault(lock, "memory is unmapped that is not mapped", kInvalidValue);
  W().device.erase(at);
  Memory(lock).mapped.erase(found);
  void* const hole =
      mmap(at, WholePages(bytes), PROT_NONE,
           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  return hole == MAP_FAILED ? kOutOfMemory : kSuccess;
}
