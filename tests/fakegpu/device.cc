// Devices and contexts.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "world.h"

namespace {

int Devices() {
  const char* const count = std::getenv("FAKEGPU_DEVICES");
  return count != nullptr ? std::atoi(count) : 1;
}

/// What XLA asks of a device: CUdevice_attribute, and the value of an H100.
const std::map<int, int> kAttributes{
    {1, 1024},        // threads of a block
    {2, 1024},        // block dimension x
    {3, 1024},        // y
    {4, 64},          // z
    {5, 2147483647},  // grid dimension x
    {6, 65535},       // y
    {7, 65535},       // z
    {8, 49152},       // shared memory of a block
    {9, 65536},       // constant memory
    {10, 32},         // threads of a warp
    {12, 65536},      // registers of a block
    {13, 1980000},    // clock, kHz
    {16, 132},        // multiprocessors
    {18, 1},          // integrated: no; maps host memory
    {19, 1},          //
    {31, 1},          // concurrent kernels
    {36, 2619000},    // memory's clock
    {37, 5120},       // memory's bus
    {38, 52428800},   // cache
    {39, 2048},       // threads of a multiprocessor
    {40, 2},          // copy engines
    {41, 1},          // one address space
    {75, 9},          // compute capability
    {78, 1},          // priorities of streams
    {81, 233472},     // shared memory of a multiprocessor
    {82, 65536},      // registers of a multiprocessor
    {83, 1},          // managed memory
    {89, 1},          // concurrent managed access
    {91, 1},          // host pointers of registered memory
    {97, 232448},     // shared memory of a block that opts in
    {102, 1},         // virtual memory
    {106, 32}};       // blocks of a multiprocessor

}  // namespace

EXPORT int cuInit(unsigned) {
  ENTER();
  W().ready = true;
  return kSuccess;
}
EXPORT int cuDriverGetVersion(int* version) { return *version = 12090, kSuccess; }
EXPORT int cuDeviceGetCount(int* count) {
  ENTER_ASKING();
  return *count = Devices(), kSuccess;
}
EXPORT int cuDeviceGet(int* device, int number) {
  ENTER_ASKING();
  if (number >= Devices()) return kInvalidDevice;
  return *device = number, kSuccess;
}
EXPORT int cuDeviceGetName(char* name, int size, int) {
  return std::snprintf(name, static_cast<size_t>(size), "no H100"), kSuccess;
}
EXPORT int cuDeviceTotalMem_v2(size_t* bytes, int) {
  return *bytes = size_t{2} << 30, kSuccess;
}
EXPORT int cuMemGetInfo_v2(size_t* available, size_t* total) {
  return *available = *total = size_t{2} << 30, kSuccess;
}
EXPORT int cuDeviceGetPCIBusId(char* name, int size, int device) {
  std::snprintf(name, static_cast<size_t>(size), "0000:%02x:00.0", device + 1);
  return kSuccess;
}
EXPORT int cuDeviceGetUuid_v2(char* uuid, int device) {
  return std::memset(uuid, device + 1, 16), kSuccess;
}
EXPORT int cuDeviceGetUuid(char* uuid, int device) {
  return std::memset(uuid, device + 1, 16), kSuccess;
}
EXPORT int cuDeviceGetAttribute(int* value, int attribute, int) {
  const auto found = kAttributes.find(attribute);
  return *value = found != kAttributes.end() ? found->second : 0, kSuccess;
}
EXPORT int cuDeviceGetP2PAttribute(int* value, int, int, int) {
  return *value = 0, kSuccess;
}
EXPORT int cuDeviceCanAccessPeer(int* can, int, int) { return *can = 0, kSuccess; }
EXPORT int cuDevicePrimaryCtxRetain(CUctx_st** context, int device) {
  ENTER_ASKING();
  return *context = &W().contexts[device], kSuccess;
}
EXPORT int cuDevicePrimaryCtxRelease_v2(int) { return kSuccess; }
EXPORT int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  *flags = 0;
  return *active = 0, kSuccess;
}
EXPORT int cuDevicePrimaryCtxSetFlags_v2(int, unsigned) { return kSuccess; }

EXPORT int cuCtxGetDevice(int* device) {
  ENTER_ASKING();
  if (t_current.empty()) return kInvalidContext;
  return *device = t_current.back()->device, kSuccess;
}
EXPORT int cuCtxSetCurrent(CUctx_st* context) {
  ENTER_ASKING();
  if (!t_current.empty()) t_current.pop_back();
  if (context != nullptr) t_current.push_back(context);
  return kSuccess;
}
EXPORT int cuCtxGetCurrent(CUctx_st** context) {
  ENTER_ASKING();
  return *context = t_current.empty() ? nullptr : t_current.back(), kSuccess;
}
EXPORT int cuCtxPushCurrent_v2(CUctx_st* context) {
  ENTER_ASKING();
  if (context == nullptr) return kInvalidContext;
  return t_current.push_back(context), kSuccess;
}
EXPORT int cuCtxPopCurrent_v2(CUctx_st** context) {
  ENTER_ASKING();
  if (t_current.empty()) return kInvalidContext;
  *context = t_current.back();
  return t_current.pop_back(), kSuccess;
}
EXPORT int cuCtxGetApiVersion(CUctx_st*, unsigned* version) {
  return *version = 12000, kSuccess;
}
EXPORT int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  return *greatest = -5, kSuccess;
}
EXPORT int cuCtxSynchronize() {
  ENTER();
  if (t_current.empty()) return kInvalidContext;
  CUctx_st* const context = t_current.back();
  for (CUstream_st* stream : std::set<CUstream_st*>(W().streams)) {
    if (W().streams.count(stream) == 0 || stream->context != context) continue;
    if (const int code = Wait(lock, stream); code != kSuccess) return code;
  }
  return kSuccess;
}

EXPORT int cuGetErrorName(int code, const char** name) {
#define FAKE_NAME(c, number, exported, text) \
  if (code == c) return *name = "CUDA_" exported, kSuccess;
  FAKE_CODES(FAKE_NAME)
  return *name = nullptr, kInvalidValue;
}
EXPORT int cuGetErrorString(int code, const char** string) {
#define FAKE_TEXT(c, number, exported, text) \
  if (code == c) return *string = text, kSuccess;
  FAKE_CODES(FAKE_TEXT)
  return *string = nullptr, kInvalidValue;
}
