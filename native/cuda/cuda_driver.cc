#include "cuda/cuda_driver.h"

#include <dlfcn.h>

#include <cstdlib>

namespace hostcall {
namespace {

/// Without a destructor: threads of the driver may use it during static
/// destruction.
CudaDriver g_driver;

std::string Describe(const CudaDriver& driver, int code) {
  const char* name = nullptr;
  const char* text = nullptr;
  // Both leave null for a code that this driver does not know.
  driver.cuGetErrorName(code, &name);
  driver.cuGetErrorString(code, &text);
  std::string all = name != nullptr ? name : "error " + std::to_string(code);
  if (text != nullptr) all += " (" + std::string(text) + ")";
  return all;
}

/// Opens and initialises the driver. Returns why there is none; else an empty text.
/// The library stays open even if it turns out to be useless: other code in the
/// process may use it, and it may have started threads.
std::string Open(CudaDriver& driver) {
  const char* path = std::getenv("HOSTCALL_CUDA_DRIVER");
  if (path == nullptr || *path == '\0') path = "libcuda.so.1";
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* error = dlerror();
    return "hostcall: the CUDA driver can't be opened (" +
           std::string(error != nullptr ? error : path) +
           "). Callbacks on a GPU need NVIDIA's driver library; if it lies "
           "elsewhere, name it in HOSTCALL_CUDA_DRIVER";
  }
  std::string missing;
  const auto find = [&](const char* name) {
    void* found = dlsym(library, name);
    if (found == nullptr)
      missing += (missing.empty() ? "" : ", ") + std::string(name);
    return found;
  };
#define HOSTCALL_CUDA_FIND(name, parameters) \
  driver.name = reinterpret_cast<int(*) parameters>(find(#name));
  HOSTCALL_CUDA_FUNCTIONS(HOSTCALL_CUDA_FIND)
#undef HOSTCALL_CUDA_FIND
  if (!missing.empty()) {
    return "hostcall: the CUDA driver " + std::string(path) + " lacks " + missing +
           ". It is older than CUDA 10, or not a CUDA driver: install one that "
           "your jaxlib supports";
  }
  const int code = driver.cuInit(0);
  if (code == kCudaSuccess) return "";
  return "hostcall: cuInit failed: " + Describe(driver, code) +
         ". The CUDA driver " + path + " exists, but can't be used";
}

}  // namespace

const std::string& CudaMissing() {
  static const auto* missing = new std::string(Open(g_driver));
  return *missing;
}

const CudaDriver& Driver() {
  if (!CudaMissing().empty()) throw std::runtime_error(CudaMissing());
  return g_driver;
}

void CudaDriver::Throw(int code, const char* function) const {
  throw CudaError("hostcall: " + std::string(function) +
                  " failed: " + Describe(*this, code));
}

ScopedContext::ScopedContext(CudaStream stream) {
  Driver().Check(Driver().cuStreamGetCtx(stream, &context_), "cuStreamGetCtx");
  Driver().Check(Driver().cuCtxPushCurrent_v2(context_), "cuCtxPushCurrent");
}

ScopedContext::ScopedContext(CudaContext context) : context_(context) {
  Driver().Check(Driver().cuCtxPushCurrent_v2(context_), "cuCtxPushCurrent");
}

ScopedContext::~ScopedContext() {
  // Its result is ignored: it fails only after an error of the driver that the
  // calls in between have reported.
  CudaContext popped = nullptr;
  Driver().cuCtxPopCurrent_v2(&popped);
}

}  // namespace hostcall
