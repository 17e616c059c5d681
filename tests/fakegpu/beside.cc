// What XLA asks of two libraries beside the driver: libnvidia-ml.so.1 and
// libcudart.so.12. Only versions; a missing function is an error to XLA, not a
// crash.
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
EXPORT const char* cudaGetErrorString(int) { return "an error of no cudart"; }
EXPORT const char* cudaGetErrorName(int) { return "cudaErrorOfNoCudart"; }
EXPORT void** __cudaRegisterFatBinary(void*) {
  static void* handle[4];
  return handle;
}
EXPORT void __cudaRegisterFatBinaryEnd(void**) {}
EXPORT void __cudaUnregisterFatBinary(void**) {}
EXPORT void __cudaRegisterFunction(void**, ...) {}
EXPORT void __cudaRegisterVar(void**, ...) {}
