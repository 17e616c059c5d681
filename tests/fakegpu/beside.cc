// What XLA and jaxlib ask of libraries beside the driver. Versions, errors, and of
// libcudart the copies that JAX's own callbacks make; a missing function is an
// error to XLA, and not a crash, unless it returns a text.
#include <dlfcn.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int nvmlInit() { return 0; }
EXPORT int nvmlInit_v2() { return 0; }
EXPORT int nvmlShutdown() { return 0; }
EXPORT const char* nvmlErrorString(int) { return "no error"; }
EXPORT int nvmlSystemGetDriverVersion(char* version, unsigned size) {
  return std::snprintf(version, size, "575.51.03"), 0;
}

EXPORT int cudaDriverGetVersion(int* version) { return *version = 12090, 0; }
EXPORT int cudaRuntimeGetVersion(int* version) { return *version = 12090, 0; }
EXPORT int cudaGetDeviceCount(int* count) {
  const char* const text = std::getenv("FAKEGPU_DEVICES");
  return *count = text != nullptr ? std::atoi(text) : 1, 0;
}
EXPORT int cudaGetLastError() { return 0; }
EXPORT int cudaPeekAtLastError() { return 0; }
EXPORT void** __cudaRegisterFatBinary(void*) {
  static void* handle[4];
  return handle;
}
EXPORT void __cudaRegisterFatBinaryEnd(void**) {}
EXPORT void __cudaUnregisterFatBinary(void**) {}
EXPORT void __cudaRegisterFunction(void**, ...) {}
EXPORT void __cudaRegisterVar(void**, ...) {}

namespace {

/// A function of the driver.
template <typename F>
F* Driver(const char* name) {
  static void* const driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  return driver == nullptr ? nullptr : reinterpret_cast<F*>(dlsym(driver, name));
}

}  // namespace

/// libcudart's codes are the driver's. It makes the stream's context current.
EXPORT int cudaMemcpyAsync(void* to, const void* from, size_t bytes, int,
                           void* stream) {
  using Address = unsigned long long;
  static auto* const get = Driver<int(void*, void**)>("cuStreamGetCtx");
  static auto* const push = Driver<int(void*)>("cuCtxPushCurrent_v2");
  static auto* const pop = Driver<int(void**)>("cuCtxPopCurrent_v2");
  static auto* const copy =
      Driver<int(Address, Address, size_t, void*)>("cuMemcpyAsync");
  void* context = nullptr;
  if (const int code = get(stream, &context); code != 0) return code;
  if (const int code = push(context); code != 0) return code;
  const int code = copy(reinterpret_cast<Address>(to),
                        reinterpret_cast<Address>(from), bytes, stream);
  pop(&context);
  return code;
}
EXPORT int cudaStreamSynchronize(void* stream) {
  static auto* const wait = Driver<int(void*)>("cuStreamSynchronize");
  return wait(stream);
}

namespace {

void CountKernel(const char* what) {
  void* const driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  if (driver == nullptr) return;
  const auto count =
      reinterpret_cast<void (*)(const char*)>(dlsym(driver, "fakeCountKernel"));
  if (count != nullptr) count(what);
}

}  // namespace

/// XLA asks for the text of an error when a function is missing: what it uses of
/// this library, apart from versions, launches kernels that XLA was built with.
EXPORT const char* cudaGetErrorString(int) {
  CountKernel("a kernel that XLA was built with");
  return "an error of no cudart";
}
EXPORT const char* cudaGetErrorName(int) { return "cudaErrorOfNoCudart"; }

/// What these libraries do are kernels, too: counted and refused, where XLA and
/// jaxlib begin to use the library.
#define REFUSED(function, library, code) \
  EXPORT int function(void** handle) {   \
    *handle = nullptr;                   \
    return CountKernel(library), code;   \
  }
REFUSED(cublasCreate_v2, "cuBLAS", 1)
REFUSED(cusolverDnCreate, "cuSOLVER", 1)
REFUSED(cusparseCreate, "cuSPARSE", 1)
REFUSED(cufftCreate, "cuFFT", 5)
/// XLA's older compilers want a cuDNN that is there, of a version that is not older
/// than theirs, whether or not a program has a convolution.
EXPORT int cudnnCreate(void** handle) {
  static int there;
  return *handle = &there, 0;
}
EXPORT int cudnnDestroy(void*) { return 0; }
EXPORT int cudnnSetStream(void*, void*) { return 0; }
EXPORT size_t cudnnGetVersion() { return 99900; }
EXPORT int cudnnGetProperty(int part, int* value) {
  const int version[] = {9, 99, 0};
  return *value = version[part], 0;
}
EXPORT const char* cudnnGetErrorString(int) { return "there is no cuDNN here"; }
REFUSED(cudnnCreateTensorDescriptor, "cuDNN", 1)
EXPORT int cudnnBackendCreateDescriptor(int, void** descriptor) {
  return cudnnCreateTensorDescriptor(descriptor);
}
EXPORT const char* cublasGetStatusName(int) {
  return "CUBLAS_STATUS_NOT_INITIALIZED";
}
EXPORT const char* cublasGetStatusString(int) { return "there is no cuBLAS here"; }
