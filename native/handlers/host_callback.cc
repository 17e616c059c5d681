#include "handlers/host_callback.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <exception>
#include <utility>

namespace hostcall {
namespace {

constexpr size_t kWords = 16;  // XLA's answer is smaller in every version so far
constexpr size_t kLargest = 4096;  // bound on a frame's and the interface's bytes
constexpr size_t kMore = 128;  // zeros behind a frame, for members of newer XLAs

// Set once, when the engine starts.
XLA_FFI_Handler* g_handler = nullptr;  ///< JAX's handler; null until it is set
void* g_callbacks[kWords];             ///< the list of callbacks: RunPending
void* g_answer[kWords];                ///< what GetterOf's function answers

/// A call on its way through JAX's handler. Lives on the stack of
/// RunInsideHostCallback.
struct Pending {
  const std::function<void()>& body;
  std::exception_ptr error;  ///< what the body threw, or null
};
thread_local Pending* t_pending = nullptr;  ///< null once RunPending has taken it
HOSTCALL_HOT int t_depth = 0;               ///< calls of RunPending on this thread

/// The member that gives the host callbacks of a program. It is the same member
/// under two names; newer headers have the second. The int argument prefers the
/// first.
template <typename Api>
auto GetterOf(Api* api, int) -> decltype(&api->XLA_FFI_ExecutionContext_Get) {
  return &api->XLA_FFI_ExecutionContext_Get;
}
template <typename Api>
auto GetterOf(Api* api, long) -> decltype(&api->XLA_FFI_InvokeContext_Get) {
  return &api->XLA_FFI_InvokeContext_Get;
}

}  // namespace

void SetHostCallbackHandler(void* handler, PyObject* run_pending) {
  Py_INCREF(run_pending);  // kept for ever: g_callbacks points to it
  std::fill(g_callbacks, g_callbacks + kWords, run_pending);
  std::fill(g_answer, g_answer + kWords, static_cast<void*>(g_callbacks));
  g_handler = reinterpret_cast<XLA_FFI_Handler*>(handler);
}

void RunPending() {
  Pending* pending = std::exchange(t_pending, nullptr);
  if (pending == nullptr) return;
  ++t_depth;
  try {
    pending->body();
  }
  // An exception must not cross the frames of JAX's handler, so it is kept, and
  // RunInsideHostCallback throws it on.
  HOSTCALL_CATCH_THE_REST { pending->error = std::current_exception(); }
  --t_depth;
}

bool InsideHostCallback() { return t_depth > 0; }

void RunInsideHostCallback(const XLA_FFI_CallFrame* frame,
                           const std::function<void()>& body) {
  const size_t size = frame->struct_size, api_size = frame->api->struct_size;
  // JAX's handler enters Python by PyGILState_Ensure, which knows only the first
  // thread state that was made for this thread. If another one is current, it would
  // wait for the GIL that its own thread holds.
  const bool known = PyGILState_GetThisThreadState() == PyThreadState_Get();
  if (g_handler == nullptr || api_size > kLargest || size > kLargest - kMore ||
      !known) {
    body();
    return;
  }
  // A copy of the interface, which answers with g_answer.
  alignas(std::max_align_t) unsigned char interface[kLargest];
  std::memcpy(interface, frame->api, api_size);
  auto* api = reinterpret_cast<XLA_FFI_Api*>(interface);
  *GetterOf(api, 0) = [](auto* args) -> XLA_FFI_Error* {
    args->data = g_answer;
    return nullptr;
  };
  alignas(std::max_align_t) unsigned char storage[kLargest];
  std::memcpy(storage, frame, size);
  // XLA does not count the last members, such as `future`, in `struct_size`.
  std::memset(storage + size, 0, kMore);
  auto* inner = reinterpret_cast<XLA_FFI_CallFrame*>(storage);
  XLA_FFI_AttrType type = XLA_FFI_AttrType_SCALAR;
  XLA_FFI_ByteSpan name{"index", 5};
  XLA_FFI_ByteSpan* names = &name;
  uint64_t index = 0;
  XLA_FFI_Scalar scalar{XLA_FFI_DataType_U64, &index};
  void* attribute = &scalar;
  // JAX's handler reads the attribute `index`, the callback's place in the list.
  // The buffers stay behind: the body has its own pointers to them.
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
  // Its error is dropped: the body keeps its own, and an error from before the body
  // shows in `ran`.
  Drop(frame->api, g_handler(inner));
  const bool ran = t_pending != &pending;  // RunPending has taken it
  t_pending = outer;
  if (pending.error) std::rethrow_exception(pending.error);
  if (!ran) body();
}

}  // namespace hostcall
