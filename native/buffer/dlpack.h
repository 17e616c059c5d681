// DLPack's structures, as its specification (version 1.1) lays them out.
#pragma once

#include <cstdint>

namespace hostcall {

struct DLDevice {
  int32_t type;
  int32_t id;
};
constexpr int32_t kDLCPU = 1, kDLCUDA = 2;

struct DLDataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

/// The structure before version 1. It can't say that the memory is read-only.
struct DLManagedTensor {
  DLTensor tensor;
  void* context;
  void (*deleter)(DLManagedTensor*);
};

/// The structure from version 1 on.
struct DLManagedTensorVersioned {
  uint32_t major, minor;
  void* context;
  void (*deleter)(DLManagedTensorVersioned*);
  uint64_t flags;
  DLTensor tensor;
};
constexpr uint64_t kDLReadOnly = 1, kDLCopied = 2;

}  // namespace hostcall
