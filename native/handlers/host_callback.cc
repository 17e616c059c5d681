#include "handlers/host_callback.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <exception>
#include <utility>

namespace hostcall {
namespace {

constexpr size_t kWords = 16;  // more than the answer has, in any version so far
constexpr size_t kLargest = 4096;  // bytes of a frame, and of the interface
constexpr size_t kMore = 128;      // bytes after a frame: members it does not have

// All guarded by the GIL.
XLA_FFI_Handler* g_handler = nullptr;
void* g_callbacks[kWords];
void* g_answer[kWords];
const XLA_FFI_Api* g_api_of = nullptr;
alignas(std::max_align_t) unsigned char g_api[kLargest];

struct Pending {
  const std::function<void()>& body;
  std::exception_ptr error;
};
thread_local Pending* t_pending = nullptr;
HOSTCALL_HOT int t_depth = 0;
thread_local Scout t_scout = Scout::kNone;

/// Where the interface is asked for the host callbacks of a program: the same place
/// under two names, the second in newer headers.
template <typename Api>
auto GetterOf(Api* api, int) -> decltype(&api->XLA_FFI_ExecutionContext_Get) {
  return &api->XLA_FFI_ExecutionContext_Get;
}
template <typename Api>
auto GetterOf(Api* api, long) -> decltype(&api->XLA_FFI_InvokeContext_Get) {
  return &api->XLA_FFI_InvokeContext_Get;
}

/// A copy of XLA's interface that answers with our callbacks. Null if it is larger
/// than expected.
const XLA_FFI_Api* Interface(const XLA_FFI_Api* api) {
  if (api->struct_size > kLargest) return nullptr;
  auto* copy = reinterpret_cast<XLA_FFI_Api*>(g_api);
  if (g_api_of != api) {
    std::memcpy(g_api, api, api->struct_size);
    *GetterOf(copy, 0) = [](auto* args) -> XLA_FFI_Error* {
      args->data = g_answer;
      return nullptr;
    };
    g_api_of = api;
  }
  return copy;
}

}  // namespace

void SetHostCallbackHandler(PyObject* handler, PyObject* run_pending) {
  Py_INCREF(run_pending);  // for good
  std::fill(g_callbacks, g_callbacks + kWords, run_pending);
  std::fill(g_answer, g_answer + kWords, static_cast<void*>(g_callbacks));
  g_handler = reinterpret_cast<XLA_FFI_Handler*>(
      PyCapsule_GetPointer(handler, PyCapsule_GetName(handler)));
}

void RunPending() {
  Pending* pending = std::exchange(t_pending, nullptr);
  if (pending == nullptr) return;
  ++t_depth;
  try {
    pending->body();
  }
  HOSTCALL_CATCH_THE_REST {  // not through JAX's frames
    pending->error = std::current_exception();
  }
  --t_depth;
}

Scout& ScoutNow() { return t_scout; }

bool AskInside() {
  if (t_scout == Scout::kNone) return false;
  t_scout = Scout::kAsked;
  return true;
}

bool InsideHostCallback() { return t_depth > 0; }

void RunInsideHostCallback(const XLA_FFI_CallFrame* frame,
                           const std::function<void()>& body) {
  const XLA_FFI_Api* api = Interface(frame->api);
  const size_t size = frame->struct_size;
  // JAX's handler enters Python by PyGILState_Ensure, which knows no other state of
  // this thread than the first that was made for it.
  const bool known = PyGILState_GetThisThreadState() == PyThreadState_Get();
  if (g_handler == nullptr || api == nullptr || size > kLargest - kMore || !known) {
    body();
    return;
  }
  alignas(std::max_align_t) unsigned char storage[kLargest];
  std::memcpy(storage, frame, size);
  // `future` and its like, which XLA leaves out of a frame's `struct_size`.
  std::memset(storage + size, 0, kMore);
  auto* inner = reinterpret_cast<XLA_FFI_CallFrame*>(storage);
  XLA_FFI_AttrType type = XLA_FFI_AttrType_SCALAR;
  XLA_FFI_ByteSpan name{"index", 5};
  XLA_FFI_ByteSpan* names = &name;
  uint64_t index = 0;
  XLA_FFI_Scalar scalar{XLA_FFI_DataType_U64, &index};
  void* attribute = &scalar;
  inner->api = api;
  inner->args.size = 0;
  inner->rets.size = 0;
  inner->attrs.size = 1;
  inner->attrs.types = &type;
  inner->attrs.names = &names;
  inner->attrs.attrs = &attribute;
  inner->future = nullptr;

  Pending pending{body, nullptr};
  Pending* outer = std::exchange(t_pending, &pending);
  Drop(frame->api, g_handler(inner));
  const bool ran = t_pending != &pending;
  t_pending = outer;
  if (pending.error) std::rethrow_exception(pending.error);
  if (!ran) body();
}

}  // namespace hostcall
