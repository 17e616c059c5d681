#include "cuda/cuda_driver.h"

#include <dlfcn.h>

#include <cstdlib>

namespace hostcall {
namespace {

struct Lookup {
  CudaDriver driver;
  std::string why;  ///< empty where there is a driver
};

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

/// Opens and initialises the driver. The library stays open even if it turns out to
/// be useless: other code in the process may use it, and it may have started
/// threads.
Lookup Open() {
  Lookup lookup;
  const char* path = std::getenv("HOSTCALL_CUDA_DRIVER");
  if (path == nullptr || *path == '\0') path = "libcuda.so.1";
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* error = dlerror();
    lookup.why = "hostcall: the CUDA driver can't be opened (" +
                 std::string(error != nullptr ? error : path) +
                 "). Callbacks on a GPU need NVIDIA's driver library; if it lies "
                 "elsewhere, name it in HOSTCALL_CUDA_DRIVER";
    return lookup;
  }
  std::string missing;
  const auto find = [&](const char* name) {
    void* found = dlsym(library, name);
    if (found == nullptr)
      missing += (missing.empty() ? "" : ", ") + std::string(name);
    return found;
  };
#define HOSTCALL_CUDA_FIND(name, parameters) \
  lookup.driver.name = reinterpret_cast<int(*) parameters>(find(#name));
  HOSTCALL_CUDA_FUNCTIONS(HOSTCALL_CUDA_FIND)
#undef HOSTCALL_CUDA_FIND
  if (!missing.empty()) {
    lookup.why = "hostcall: the CUDA driver " + std::string(path) + " lacks " +
                 missing +
                 ". It is older than CUDA 10, or not a CUDA driver: install "
                 "one that your jaxlib supports";
    return lookup;
  }
  const int code = lookup.driver.cuInit(0);
  if (code != kCudaSuccess) {
    lookup.why = "hostcall: cuInit failed: " + Describe(lookup.driver, code) +
                 ". The CUDA driver " + path + " exists, but can't be used";
  }
  return lookup;
}

}  // namespace

const CudaDriver* CudaDriver::Get(std::string* why) {
  // Never destroyed: threads of the driver may use it during static destruction.
  static const Lookup* lookup = new Lookup(Open());
  if (lookup->why.empty()) return &lookup->driver;
  if (why != nullptr) *why = lookup->why;
  return nullptr;
}

void CudaDriver::Throw(int code, const char* function) const {
  throw CudaError(
      "hostcall: " + std::string(function) + " failed: " + Describe(*this, code),
      code);
}

ScopedContext::ScopedContext(const CudaDriver& driver, CudaStream stream)
    : driver_(driver) {
  driver_.Check(driver_.cuStreamGetCtx(stream, &context_), "cuStreamGetCtx");
  driver_.Check(driver_.cuCtxPushCurrent_v2(context_), "cuCtxPushCurrent");
}

ScopedContext::ScopedContext(const CudaDriver& driver, CudaContext context)
    : driver_(driver), context_(context) {
  driver_.Check(driver_.cuCtxPushCurrent_v2(context_), "cuCtxPushCurrent");
}

ScopedContext::~ScopedContext() {
  // Its result is ignored: it fails only after an error of the driver that the
  // calls in between have reported.
  CudaContext popped = nullptr;
  driver_.cuCtxPopCurrent_v2(&popped);
}

}  // namespace hostcall
