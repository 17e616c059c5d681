// The CUDA driver, opened at run time.
//
// hostcall is built without a CUDA toolkit and also runs without a GPU, so it links
// nothing of CUDA. The library is opened when the first program with a callback is
// compiled for a GPU; by then XLA has opened the same library. The few types,
// constants and signatures below are facts of the driver's public binary interface.
// A `_v2` in a name is the version that 64-bit programs use.
//
// Does not depend on Python or XLA (tests/native/staging_test.cc, with a fake
// driver).
//
// Guarantees
//   * One library, opened once in the life of the process and never closed, since
//     threads that nobody joins call its functions.
//   * Without a driver nothing breaks: CudaMissing says why there is none.
//   * All functions are safe to call from several threads.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>

#include "base/no_copy.h"

struct CUctx_st;
struct CUevent_st;
struct CUstream_st;

namespace hostcall {

using CudaContext = CUctx_st*;
using CudaEvent = CUevent_st*;
using CudaStream = CUstream_st*;
using CudaDevicePtr = unsigned long long;  // CUdeviceptr of 64-bit systems
using CudaHostFn = void (*)(void* data);   // runs on a thread of the driver

constexpr int kCudaSuccess = 0;
constexpr int kCudaOutOfMemory = 2;
constexpr int kCudaNotReady = 600;
constexpr unsigned kCudaHostAllocPortable = 1;   ///< pinned for every context
constexpr unsigned kCudaEventDisableTiming = 2;  ///< cheaper to record
constexpr unsigned kCudaStreamNonBlocking = 1;   ///< apart from the default stream

/// A call of the driver failed.
struct CudaError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// The functions of the driver that hostcall uses: the exported name and the
/// parameters. Each returns a CUresult.
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
  X(cuStreamCreate, (CudaStream*, unsigned flags))                     \
  X(cuStreamWaitEvent, (CudaStream, CudaEvent, unsigned flags))        \
  X(cuStreamQuery, (CudaStream))                                       \
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
  /// Throws CudaError unless `code` is success. The text reads, for example,
  /// "hostcall: cuMemHostAlloc failed: CUDA_ERROR_OUT_OF_MEMORY (out of memory)".
  void Check(int code, const char* function) const {
    if (code != kCudaSuccess) Throw(code, function);
  }

  // Each enqueues work on a stream, on at least one byte. They throw CudaError.

  void CopyToHost(CudaStream on, void* to, const void* from, size_t bytes) const {
    Check(cuMemcpyDtoHAsync_v2(to, Ptr(from), bytes, on), "cuMemcpyDtoHAsync");
  }
  void CopyToDevice(CudaStream on, void* to, const void* from, size_t bytes) const {
    Check(cuMemcpyHtoDAsync_v2(Ptr(to), from, bytes, on), "cuMemcpyHtoDAsync");
  }
  void CopyOnDevice(CudaStream on, void* to, const void* from, size_t bytes) const {
    Check(cuMemcpyDtoDAsync_v2(Ptr(to), Ptr(from), bytes, on), "cuMemcpyDtoDAsync");
  }
  void Fill(CudaStream on, void* to, unsigned char value, size_t bytes) const {
    Check(cuMemsetD8Async(Ptr(to), value, bytes, on), "cuMemsetD8Async");
  }

  /// Waits until what is enqueued on the stream has ended. Throws CudaError.
  void Synchronize(CudaStream on) const {
    Check(cuStreamSynchronize(on), "cuStreamSynchronize");
  }
  /// Whether the work on the stream is being recorded into a CUDA graph. Throws
  /// CudaError.
  bool IsCaptured(CudaStream on) const {
    int status = 0;
    Check(cuStreamIsCapturing(on, &status), "cuStreamIsCapturing");
    return status != 0;
  }

#define HOSTCALL_CUDA_MEMBER(name, parameters) int(*name) parameters = nullptr;
  HOSTCALL_CUDA_FUNCTIONS(HOSTCALL_CUDA_MEMBER)
#undef HOSTCALL_CUDA_MEMBER

 private:
  static CudaDevicePtr Ptr(const void* address) {
    return reinterpret_cast<CudaDevicePtr>(address);
  }
  [[noreturn]] void Throw(int code, const char* function) const;
};

/// The reason why there is no driver, or it lacks a function: what is wrong and
/// what to do. Empty if there is one; it is then initialised. The library is
/// libcuda.so.1, or the one that the environment variable HOSTCALL_CUDA_DRIVER
/// names at the first call.
const std::string& CudaMissing();
/// The driver; lives as long as the process. Throws std::runtime_error if there is
/// none.
const CudaDriver& Driver();

/// Makes a context current on the calling thread for the guard's life.
///
/// A thread of XLA may have no current context, or that of another device. But most
/// calls of the driver act on the current context, and an event can be recorded
/// only on a stream of the context that it was made in.
class ScopedContext : NoCopy {
 public:
  /// Makes the stream's own context current. Throws CudaError.
  explicit ScopedContext(CudaStream stream);
  explicit ScopedContext(CudaContext context);
  ~ScopedContext();

  CudaContext context() const { return context_; }

 private:
  CudaContext context_ = nullptr;  ///< the one made current; not owned
};

}  // namespace hostcall
