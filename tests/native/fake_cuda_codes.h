// The results of the fake driver (fake_cuda.cc): a name, the CUresult, and the
// driver's name and text for it.
#pragma once

#define FAKE_CODES(X)                                                        \
  X(kSuccess, 0, "SUCCESS", "no error")                                      \
  X(kInvalidValue, 1, "ERROR_INVALID_VALUE", "invalid argument")             \
  X(kOutOfMemory, 2, "ERROR_OUT_OF_MEMORY", "out of memory")                 \
  X(kNotInitialized, 3, "ERROR_NOT_INITIALIZED", "initialization error")     \
  X(kNoDevice, 100, "ERROR_NO_DEVICE", "no CUDA-capable device is detected") \
  X(kInvalidContext, 201, "ERROR_INVALID_CONTEXT", "invalid device context") \
  X(kInvalidHandle, 400, "ERROR_INVALID_HANDLE", "invalid resource handle")  \
  X(kNotReady, 600, "ERROR_NOT_READY", "device not ready")                   \
  X(kNotPermitted, 800, "ERROR_NOT_PERMITTED", "operation not permitted")    \
  X(kCaptureUnsupported, 900, "ERROR_STREAM_CAPTURE_UNSUPPORTED", "not in capture")

#define FAKE_CODE(name, code, exported, text) name = code,
enum : int { FAKE_CODES(FAKE_CODE) };
