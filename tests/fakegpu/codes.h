// The results of the driver: a name, the CUresult, and the driver's name and text
// for it.
#pragma once

#define FAKE_CODES(X)                                                        \
  X(kSuccess, 0, "SUCCESS", "no error")                                      \
  X(kInvalidValue, 1, "ERROR_INVALID_VALUE", "invalid argument")             \
  X(kOutOfMemory, 2, "ERROR_OUT_OF_MEMORY", "out of memory")                 \
  X(kNotInitialized, 3, "ERROR_NOT_INITIALIZED", "initialization error")     \
  X(kNoDevice, 100, "ERROR_NO_DEVICE", "no CUDA-capable device is detected") \
  X(kInvalidDevice, 101, "ERROR_INVALID_DEVICE", "invalid device ordinal")   \
  X(kInvalidContext, 201, "ERROR_INVALID_CONTEXT", "invalid device context") \
  X(kInvalidHandle, 400, "ERROR_INVALID_HANDLE", "invalid resource handle")  \
  X(kNotFound, 500, "ERROR_NOT_FOUND", "named symbol not found")             \
  X(kNotReady, 600, "ERROR_NOT_READY", "device not ready")                   \
  X(kIllegalAddress, 700, "ERROR_ILLEGAL_ADDRESS",                           \
    "an illegal memory access was encountered")                              \
  X(kNotPermitted, 800, "ERROR_NOT_PERMITTED", "operation not permitted")    \
  X(kNotSupported, 801, "ERROR_NOT_SUPPORTED", "operation not supported")    \
  X(kCaptureUnsupported, 900, "ERROR_STREAM_CAPTURE_UNSUPPORTED",            \
    "not in capture")                                                        \
  X(kCaptureInvalidated, 901, "ERROR_STREAM_CAPTURE_INVALIDATED",            \
    "the capture was spoilt by an earlier error")

#define FAKE_CODE(name, code, exported, text) name = code,
enum : int { FAKE_CODES(FAKE_CODE) };
