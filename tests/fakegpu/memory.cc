// Memory, and copies on streams.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "world.h"

namespace {

using namespace fakegpu;

int MakeDevices(Lock& lock, Address* address, size_t bytes, bool xlas) {
  World& w = W();
  const int device = t_current.empty() ? 0 : t_current.back()->device;
  if (!HasSpace(lock, bytes, device)) return kOutOfMemory;
  char* const data = Allocate(bytes, 0xcd);
  if (data == nullptr) return kOutOfMemory;
  w.device[data] = Block{bytes, device, !xlas};
  w.has_device_memory = true;
  *address = reinterpret_cast<Address>(data);
  return kSuccess;
}

/// Frees the block that begins there.
int Free(Lock& lock, Blocks& blocks, void* data) {
  const auto found = blocks.find(static_cast<char*>(data));
  if (found == blocks.end())
    return Fault(lock, "memory is freed that is not there", kInvalidValue);
  if (found->second.queued != 0)
    return Fault(lock, "memory is freed that a queued copy uses", kInvalidValue);
  if (found->second.mapped)
    return Fault(lock, "mapped memory is freed", kInvalidValue);
  blocks.erase(found);
  std::free(data);
  return kSuccess;
}

/// Which memory a side of a copy may be.
enum Side { kDevices, kHosts };

/// A copy. What is not XLA's may copy pinned memory only.
struct Copy {
  const char* function;
  bool xlas;
  void* to;
  const void* from;
  size_t bytes;
  Side to_side, from_side;

  int Enqueue(Lock& lock, CUstream_st* handle) const {
    CUstream_st* const stream = Find(lock, handle);
    if (stream == nullptr) return Broken(lock, "no such stream", kInvalidHandle);
    if (bytes == 0) return kSuccess;  // wherever it would be from and to
    if (to == nullptr || from == nullptr) return kInvalidValue;
    if (t_current.empty() || t_current.back() != stream->context)
      return Broken(lock, "another context is current", kInvalidContext);
    if (!IsThere(lock))
      return Broken(lock, "this is no memory of a device", kInvalidValue);
    const void* const host = to_side == kHosts ? to : from;
    const bool has_host = to_side == kHosts || from_side == kHosts;
    Block* const pinned =
        has_host ? Within(lock, W().pinned, host, bytes) : nullptr;
    if (has_host && pinned == nullptr && !xlas)
      return Broken(lock, "this is no pinned memory", kInvalidValue);
    if (stream->capture != nullptr) return Record(lock, stream), kSuccess;
    if (has_host && pinned == nullptr) return EnqueuePageable(lock, stream);
    if (pinned != nullptr) ++pinned->queued;
    fakegpu::Enqueue(lock, stream, [copy = *this, pinned] {
      copy.Run("its memory is gone");  // it may have been unmapped
      if (pinned == nullptr) return;
      Lock done(W().mutex);
      --pinned->queued;
    });
    return kSuccess;
  }

  void Note(Lock& lock) const {
    Touch(lock, from, bytes, false, function);
    Touch(lock, to, bytes, true, function);
  }

 private:
  bool IsThere(Lock& lock) const {
    return (to_side != kDevices || IsDevices(lock, to, bytes)) &&
           (from_side != kDevices || IsDevices(lock, from, bytes));
  }
  int Broken(Lock& lock, const char* why, int code) const {
    return Fault(lock, std::string(function) + ": " + why, code);
  }
  /// `gone` is the fault if the memory is not there any more.
  void Run(const char* gone) const {
    Lock before(W().mutex);
    if (!IsThere(before)) return static_cast<void>(Broken(before, gone, 0));
    before.unlock();
    std::memcpy(to, from, bytes);
    Lock done(W().mutex);
    Note(done);
  }
  /// A graph may run when memory that it was recorded with is gone.
  void Record(Lock& lock, CUstream_st* stream) const {
    fakegpu::Enqueue(lock, stream, [copy = *this] {
      copy.Run("a graph has a copy of memory that is gone");
    });
  }
  /// The driver copies pageable memory through a buffer of its own.
  int EnqueuePageable(Lock& lock, CUstream_st* stream) const {
    if (to_side == kHosts) {
      fakegpu::Enqueue(lock, stream, [copy = *this] {
        std::memcpy(copy.to, copy.from, copy.bytes);
        Lock done(W().mutex);
        Touch(done, copy.from, copy.bytes, false, copy.function);
      });
      return Wait(lock, stream);
    }
    const auto* const begin = static_cast<const char*>(from);
    auto kept = std::make_shared<std::vector<char>>(begin, begin + bytes);
    fakegpu::Enqueue(lock, stream, [copy = *this, kept] {
      std::memcpy(copy.to, kept->data(), copy.bytes);
      Lock done(W().mutex);
      Touch(done, copy.to, copy.bytes, true, copy.function);
    });
    return kSuccess;
  }
};

template <typename Number>
int Fill(Lock& lock, const char* function, Address to, Number value, size_t count,
         CUstream_st* handle) {
  CUstream_st* const stream = Find(lock, handle);
  if (stream == nullptr) return Fault(lock, "no such stream", kInvalidHandle);
  if (!IsDevices(lock, Pointer(to), count * sizeof(Number)))
    return Fault(lock, std::string(function) + ": this is no memory of a device",
                 kInvalidValue);
  Enqueue(lock, stream, [=] {
    std::fill_n(static_cast<Number*>(Pointer(to)), count, value);
    Lock done(W().mutex);
    Touch(done, Pointer(to), count * sizeof(Number), true, function);
  });
  return kSuccess;
}

}  // namespace

// --- Memory
// -----------------------------------------------------------------------

EXPORT int cuMemAlloc_v2(Address* address, size_t bytes) {
  ENTER();
  if (t_current.empty()) return kInvalidContext;
  return MakeDevices(lock, address, bytes, xlas);
}
EXPORT int cuMemAllocManaged(Address* address, size_t bytes, unsigned) {
  ENTER();
  return MakeDevices(lock, address, bytes, xlas);
}
/// Waits for all work of the device, as the real one does: nothing that was
/// enqueued before may still use the memory.
EXPORT int cuMemFree_v2(Address address) {
  ENTER();
  const Block* const block = Within(lock, W().device, Pointer(address), 0);
  WaitForAll(lock, block != nullptr ? block->device : -1);
  return Free(lock, W().device, Pointer(address));
}
EXPORT int cuMemHostAlloc(void** data, size_t bytes, unsigned flags) {
  ENTER();
  if (t_current.empty()) return kInvalidContext;
  if (bytes == 0) return kInvalidValue;
  if (!xlas && (flags & 1) == 0) return kInvalidValue;  // has to be portable
  if (W().pinned_waits) WaitForAll(lock);
  *data = Allocate(bytes, 0xa5);
  if (*data == nullptr) return kOutOfMemory;
  W().pinned[static_cast<char*>(*data)] =
      Block{bytes, t_current.back()->device, !xlas};
  return kSuccess;
}
EXPORT int cuMemFreeHost(void* data) {
  ENTER();
  if (t_current.empty()) return kInvalidContext;
  if (W().pinned_waits) WaitForAll(lock);
  return Free(lock, W().pinned, data);
}
EXPORT int cuMemHostRegister_v2(void* data, size_t bytes, unsigned) {
  ENTER();
  W().pinned[static_cast<char*>(data)] = Block{bytes, 0, !xlas};
  return kSuccess;
}
EXPORT int cuMemHostUnregister(void* data) {
  ENTER();
  return W().pinned.erase(static_cast<char*>(data)) != 0 ? kSuccess : kInvalidValue;
}
EXPORT int cuMemHostGetDevicePointer_v2(Address* address, void* data, unsigned) {
  return *address = reinterpret_cast<Address>(data), kSuccess;
}
EXPORT int cuMemGetAddressRange_v2(Address* begin, size_t* bytes, Address address) {
  ENTER();
  auto found = W().device.upper_bound(static_cast<char*>(Pointer(address)));
  if (found == W().device.begin()) return kInvalidValue;
  --found;
  if (begin != nullptr) *begin = reinterpret_cast<Address>(found->first);
  if (bytes != nullptr) *bytes = found->second.size;
  return kSuccess;
}

namespace {

/// CUpointer_attribute: 2 is the kind of memory (2 a device's, 1 the host's), 7 the
/// unique number, 9 the device, 11 and 12 the range.
void Answer(Lock& lock, void* value, int attribute, Address address) {
  const void* const at = Pointer(address);
  Block* const device = Within(lock, W().device, at, 1);
  Block* const block = device ? device : Within(lock, W().pinned, at, 1);
  switch (attribute) {
    case 2:
      *static_cast<unsigned*>(value) = device ? 2 : block ? 1 : 0;
      return;
    case 7:
      *static_cast<Address*>(value) = address;
      return;
    case 11:
      *static_cast<Address*>(value) = address / 4096 * 4096;
      return;
    case 12:
      *static_cast<size_t*>(value) = block ? block->size : 0;
      return;
    default:
      *static_cast<int*>(value) = attribute == 9 && block ? block->device : 0;
  }
}

}  // namespace

EXPORT int cuPointerGetAttribute(void* value, int attribute, Address address) {
  ENTER_ASKING();
  if (!Within(lock, W().device, Pointer(address), 1) &&
      !Within(lock, W().pinned, Pointer(address), 1))
    return kInvalidValue;
  return Answer(lock, value, attribute, address), kSuccess;
}
EXPORT int cuPointerGetAttributes(unsigned count, int* attributes, void** values,
                                  Address address) {
  ENTER_ASKING();
  for (unsigned i = 0; i < count; ++i)
    Answer(lock, values[i], attributes[i], address);
  return kSuccess;
}

// --- Copies
// -----------------------------------------------------------------------

EXPORT int cuMemcpyDtoHAsync_v2(void* to, Address from, size_t bytes,
                                CUstream_st* stream) {
  ENTER();
  const Copy copy{__func__, xlas, to, Pointer(from), bytes, kHosts, kDevices};
  return copy.Enqueue(lock, stream);
}
EXPORT int cuMemcpyHtoDAsync_v2(Address to, const void* from, size_t bytes,
                                CUstream_st* stream) {
  ENTER();
  const Copy copy{__func__, xlas, Pointer(to), from, bytes, kDevices, kHosts};
  return copy.Enqueue(lock, stream);
}
EXPORT int cuMemcpyDtoDAsync_v2(Address to, Address from, size_t bytes,
                                CUstream_st* stream) {
  ENTER();
  const Copy copy{__func__, xlas,     Pointer(to), Pointer(from),
                  bytes,    kDevices, kDevices};
  return copy.Enqueue(lock, stream);
}
EXPORT int cuMemcpyAsync(Address to, Address from, size_t bytes,
                         CUstream_st* stream) {
  ENTER();
  const Side of_to =
      Within(lock, W().device, Pointer(to), bytes) ? kDevices : kHosts;
  const Side of_from =
      Within(lock, W().device, Pointer(from), bytes) ? kDevices : kHosts;
  const Copy copy{__func__, xlas,  Pointer(to), Pointer(from),
                  bytes,    of_to, of_from};
  return copy.Enqueue(lock, stream);
}
/// From one device to another, both of whose contexts are named: XLA makes it on a
/// stream of the device that has the values.
EXPORT int cuMemcpyPeerAsync(Address to, CUctx_st* to_context, Address from,
                             CUctx_st* from_context, size_t bytes,
                             CUstream_st* stream) {
  ENTER();
  const auto is_of = [&](Address address, const CUctx_st* context) {
    const Block* const block = Within(lock, W().device, Pointer(address), bytes);
    return block != nullptr && block->device == context->device;
  };
  if (bytes != 0 && (!is_of(to, to_context) || !is_of(from, from_context)))
    return Fault(lock, std::string(__func__) + ": this is another device's memory",
                 kInvalidValue);
  const Copy copy{__func__, xlas,     Pointer(to), Pointer(from),
                  bytes,    kDevices, kDevices};
  return copy.Enqueue(lock, stream);
}
EXPORT int cuMemcpyHtoD_v2(Address to, const void* from, size_t bytes) {
  ENTER();
  if (!IsDevices(lock, Pointer(to), bytes)) return kInvalidValue;
  return std::memcpy(Pointer(to), from, bytes), kSuccess;
}
EXPORT int cuMemcpyDtoH_v2(void* to, Address from, size_t bytes) {
  ENTER();
  if (!IsDevices(lock, Pointer(from), bytes)) return kInvalidValue;
  return std::memcpy(to, Pointer(from), bytes), kSuccess;
}
EXPORT int cuMemcpyDtoD_v2(Address to, Address from, size_t bytes) {
  ENTER();
  if (!IsDevices(lock, Pointer(to), bytes) ||
      !IsDevices(lock, Pointer(from), bytes))
    return kInvalidValue;
  return std::memcpy(Pointer(to), Pointer(from), bytes), kSuccess;
}
EXPORT int cuMemsetD8Async(Address to, unsigned char value, size_t count,
                           CUstream_st* stream) {
  ENTER();
  return Fill(lock, __func__, to, value, count, stream);
}
EXPORT int cuMemsetD32Async(Address to, unsigned value, size_t count,
                            CUstream_st* stream) {
  ENTER();
  return Fill(lock, __func__, to, value, count, stream);
}
EXPORT int cuMemsetD8_v2(Address to, unsigned char value, size_t count) {
  ENTER();
  const int code = Fill(lock, __func__, to, value, count, nullptr);
  return code != kSuccess ? code : Wait(lock, Find(lock, nullptr));
}
EXPORT int cuMemsetD32_v2(Address to, unsigned value, size_t count) {
  ENTER();
  const int code = Fill(lock, __func__, to, value, count, nullptr);
  return code != kSuccess ? code : Wait(lock, Find(lock, nullptr));
}
