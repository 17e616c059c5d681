// The CUDA driver, opened at run time.
//
// hostcall is built without a CUDA toolkit and runs where there is no GPU, so it
// links nothing of CUDA's: the library is opened when the first program with a
// callback is compiled for a GPU, and XLA has opened the same one by then. The few
// types, constants and signatures below are facts of the driver's public binary
// interface; a `_v2` in a name is the version that 64-bit programs are bound to.
// Knows no Python and no XLA (tests/native/staging_test.cc: with a fake driver).
//
// Guarantees
//   * One library, looked up once in the life of the process and never closed: its
//     functions are called by threads that nobody joins.
//   * Without a driver nothing breaks: Get gives null and says why.
//   * Get and all members are safe to call from several threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

struct CUctx_st;
struct CUevent_st;
struct CUstream_st;

namespace hostcall {

using CudaContext = CUctx_st*;
using CudaEvent = CUevent_st*;
using CudaStream = CUstream_st*;
using CudaDevicePtr = unsigned long long;  // CUdeviceptr of 64-bit systems
using CudaHostFn = void (*)(void* data);

constexpr int kCudaSuccess = 0;
constexpr int kCudaOutOfMemory = 2;
constexpr int kCudaCaptureUnsupported = 900;
constexpr unsigned kCudaHostAllocPortable = 1;   ///< pinned for every context
constexpr unsigned kCudaEventDisableTiming = 2;  ///< cheaper to record

/// A call of the driver that failed.
class CudaError : public std::runtime_error {
 public:
  CudaError(const std::string& text, int code)
      : std::runtime_error(text), code_(code) {}
  int code() const { return code_; }

 private:
  int code_;
};

/// All that is used of the driver: names as exported, parameters. Each returns a
/// CUresult.
#define HOSTCALL_CUDA_FUNCTIONS(X)                                     \
  X(cuInit, (unsigned flags))                                          \
  X(cuMemHostAlloc, (void** data, size_t bytes, unsigned flags))       \
  X(cuMemFreeHost, (void* data))                                       \
  X(cuMemcpyDtoHAsync_v2,                                              \
    (void* to, CudaDevicePtr from, size_t bytes, CudaStream))          \
  X(cuMemcpyHtoDAsync_v2,                                              \
    (CudaDevicePtr to, const void* from, size_t bytes, CudaStream))    \
  X(cuMemcpyDtoDAsync_v2,                                              \
    (CudaDevicePtr to, CudaDevicePtr from, size_t bytes, CudaStream))  \
  X(cuMemsetD8Async,                                                   \
    (CudaDevicePtr to, unsigned char value, size_t bytes, CudaStream)) \
  X(cuStreamSynchronize, (CudaStream))                                 \
  X(cuStreamGetCtx, (CudaStream, CudaContext*))                        \
  X(cuStreamIsCapturing, (CudaStream, int* status))                    \
  X(cuCtxGetCurrent, (CudaContext*))                                   \
  X(cuCtxPushCurrent_v2, (CudaContext))                                \
  X(cuCtxPopCurrent_v2, (CudaContext*))                                \
  X(cuCtxSynchronize, ())                                              \
  X(cuEventCreate, (CudaEvent*, unsigned flags))                       \
  X(cuEventRecord, (CudaEvent, CudaStream))                            \
  X(cuEventQuery, (CudaEvent))                                         \
  X(cuEventSynchronize, (CudaEvent))                                   \
  X(cuEventDestroy_v2, (CudaEvent))                                    \
  X(cuLaunchHostFunc, (CudaStream, CudaHostFn, void* data))            \
  X(cuGetErrorName, (int code, const char** name))                     \
  X(cuGetErrorString, (int code, const char** text))

struct CudaDriver {
  /// The driver, initialised. Null where there is none, or one that lacks
  /// something; `*why` then says which, and what to do. The library is
  /// libcuda.so.1, or what the environment variable HOSTCALL_CUDA_DRIVER names at
  /// the first call.
  static const CudaDriver* Get(std::string* why = nullptr);

  /// Throws CudaError where `code` is no success: "hostcall: cuMemHostAlloc failed:
  /// CUDA_ERROR_OUT_OF_MEMORY (out of memory)".
  void Check(int code, const char* function) const {
    if (code != kCudaSuccess) Throw(code, function);
  }

#define HOSTCALL_CUDA_MEMBER(name, parameters) int(*name) parameters = nullptr;
  HOSTCALL_CUDA_FUNCTIONS(HOSTCALL_CUDA_MEMBER)
#undef HOSTCALL_CUDA_MEMBER

 private:
  [[noreturn]] void Throw(int code, const char* function) const;
};

/// Makes a context current on the calling thread for the guard's life.
///
/// Threads of XLA may have none, or that of another device: most calls take the
/// current one for theirs, and an event can only be recorded on a stream of the
/// context in which it was made.
class ScopedContext {
 public:
  /// The stream's own. Throws CudaError.
  ScopedContext(const CudaDriver& driver, CudaStream stream);
  ScopedContext(const CudaDriver& driver, CudaContext context);
  ~ScopedContext();
  ScopedContext(const ScopedContext&) = delete;
  ScopedContext& operator=(const ScopedContext&) = delete;

  CudaContext context() const { return context_; }

 private:
  const CudaDriver& driver_;
  CudaContext context_ = nullptr;
};

}  // namespace hostcall
