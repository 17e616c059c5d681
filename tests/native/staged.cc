// The engine's handlers for CUDA in XLA's CPU runtime, for tests on machines
// without a GPU. Each handler here calls one of the engine's with a frame that has
// another interface:
//
//   * Stream_Get answers with a stream of the driver (tests/fakegpu). XLA's CPU
//     runtime knows no streams.
//   * State_Get asks for the type that plans have in the CPU runtime's registry.
//
// It returns when all streams are empty, since that runtime would use the results
// at once, and since tests look for taps as soon as a program has ended.
#include <Python.h>

#include <cstddef>
#include <cstring>
#include <utility>
#include <vector>

#include "xla/ffi/api/c_api.h"

namespace {

constexpr size_t kLargest = 4096;  // bound on a frame's and the interface's bytes
constexpr int kHandlers = 8;

struct Settings {
  std::vector<void*> streams;  ///< one for each device
  int (*synchronize)(void* stream);
  void (*finish_all)();
  XLA_FFI_TypeId* type;  ///< of plans, in the CPU runtime's registry
  XLA_FFI_Handler* inner[kHandlers];
};
Settings g_settings;  // written before a program runs

alignas(std::max_align_t) unsigned char g_api[kLargest];
const XLA_FFI_Api* g_api_of = nullptr;  ///< the interface that g_api is a copy of
thread_local void* t_stream = nullptr;  ///< what Stream_Get answers here

XLA_FFI_Error* AnswerStream(XLA_FFI_Stream_Get_Args* args) {
  args->stream = t_stream;
  return nullptr;
}

XLA_FFI_Error* AnswerState(XLA_FFI_State_Get_Args* args) {
  args->type_id = g_settings.type;
  return g_api_of->XLA_FFI_State_Get(args);
}

/// A copy of the interface of XLA's CPU runtime, of which there is one. Null if it
/// is larger than expected.
const XLA_FFI_Api* Interface(const XLA_FFI_Api* api) {
  static const bool copied = [api] {
    if (api->struct_size > kLargest) return false;
    std::memcpy(g_api, api, api->struct_size);
    auto* copy = reinterpret_cast<XLA_FFI_Api*>(g_api);
    copy->XLA_FFI_Stream_Get = AnswerStream;
    copy->XLA_FFI_State_Get = AnswerState;
    g_api_of = api;
    return true;
  }();
  return copied ? reinterpret_cast<const XLA_FFI_Api*>(g_api) : nullptr;
}

int DeviceOf(const XLA_FFI_CallFrame* frame) {
  XLA_FFI_DeviceOrdinal_Get_Args args;
  args.struct_size = XLA_FFI_DeviceOrdinal_Get_Args_STRUCT_SIZE;
  args.extension_start = nullptr;
  args.ctx = frame->ctx;
  args.device_ordinal = 0;
  frame->api->XLA_FFI_DeviceOrdinal_Get(&args);
  return args.device_ordinal;
}

template <int kNumber>
XLA_FFI_Error* Execute(XLA_FFI_CallFrame* frame) {
  const Settings& to = g_settings;
  if (frame->extension_start != nullptr &&
      frame->extension_start->type == XLA_FFI_Extension_Metadata) {
    return to.inner[kNumber](frame);  // it has no interface yet
  }
  const XLA_FFI_Api* api = Interface(frame->api);
  if (api == nullptr || frame->struct_size > kLargest) return nullptr;
  alignas(std::max_align_t) unsigned char bytes[kLargest] = {};
  std::memcpy(bytes, frame, frame->struct_size);
  auto* copy = reinterpret_cast<XLA_FFI_CallFrame*>(bytes);
  void* const stream =
      to.streams[static_cast<size_t>(DeviceOf(frame)) % to.streams.size()];
  copy->api = api;
  // The function of a call may run a program that comes here again.
  void* const before = std::exchange(t_stream, stream);
  XLA_FFI_Error* error = to.inner[kNumber](copy);
  t_stream = before;
  // What streams wait for may need the GIL.
  PyThreadState* held = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
  to.synchronize(stream);
  to.finish_all();
  if (held != nullptr) PyEval_RestoreThread(held);
  return error;
}

XLA_FFI_Handler* const kOuter[kHandlers] = {Execute<0>, Execute<1>, Execute<2>,
                                            Execute<3>, Execute<4>, Execute<5>,
                                            Execute<6>, Execute<7>};

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

/// Called once, before the handlers.
EXPORT void SetUp(void** streams, int count, int (*synchronize)(void*),
                  void (*finish_all)(), void* type) {
  g_settings.streams.assign(streams, streams + count);
  g_settings.synchronize = synchronize;
  g_settings.finish_all = finish_all;
  g_settings.type = static_cast<XLA_FFI_TypeId*>(type);
}

/// The handler of a number that calls another one.
EXPORT void* Wrap(int number, void* inner) {
  g_settings.inner[number] = reinterpret_cast<XLA_FFI_Handler*>(inner);
  return reinterpret_cast<void*>(kOuter[number]);
}
