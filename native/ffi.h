// Layer F. What every handler needs of XLA's C interface.
#pragma once

#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <string_view>

#include "detached.h"
#include "engine.h"
#include "xla/ffi/api/c_api.h"

namespace hostcall {

inline XLA_FFI_Error* MakeError(
    const XLA_FFI_Api* api, const std::string& text,
    XLA_FFI_Error_Code code = XLA_FFI_Error_Code_INTERNAL) {
  XLA_FFI_Error_Create_Args args;
  args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
  args.extension_start = nullptr;
  args.message = text.c_str();
  args.errc = code;
  return api->XLA_FFI_Error_Create(&args);
}

/// True where XLA only asked what interface the handler was built for.
inline bool AnswerMetadata(XLA_FFI_CallFrame* frame, XLA_FFI_TypeId state_type,
                           uint32_t traits = 0) {
  if (frame->extension_start == nullptr ||
      frame->extension_start->type != XLA_FFI_Extension_Metadata) {
    return false;
  }
  auto* metadata =
      reinterpret_cast<XLA_FFI_Metadata_Extension*>(frame->extension_start)
          ->metadata;
  metadata->api_version.major_version = XLA_FFI_API_MAJOR;
  metadata->api_version.minor_version = XLA_FFI_API_MINOR;
  metadata->traits = traits;
  metadata->state_type_id = state_type;
  return true;
}

inline uint64_t Attribute(const XLA_FFI_CallFrame* frame, std::string_view name) {
  const XLA_FFI_Attrs& attrs = frame->attrs;
  for (int64_t i = 0; i < attrs.size; ++i) {
    if (std::string_view(attrs.names[i]->ptr, attrs.names[i]->len) != name ||
        attrs.types[i] != XLA_FFI_AttrType_SCALAR) {
      continue;
    }
    const auto* scalar = static_cast<const XLA_FFI_Scalar*>(attrs.attrs[i]);
    if (scalar->dtype != XLA_FFI_DataType_U64) return 0;
    uint64_t value;
    std::memcpy(&value, scalar->value, sizeof value);
    return value;
  }
  return 0;
}

/// Lets go of an error that changes nothing.
inline bool Drop(const XLA_FFI_Api* api, XLA_FFI_Error* error) {
  if (error == nullptr) return false;
  XLA_FFI_Error_Destroy_Args args;
  args.struct_size = XLA_FFI_Error_Destroy_Args_STRUCT_SIZE;
  args.extension_start = nullptr;
  args.error = error;
  api->XLA_FFI_Error_Destroy(&args);
  return true;
}

inline int DeviceOrdinal(const XLA_FFI_CallFrame* frame) {
  XLA_FFI_DeviceOrdinal_Get_Args args;
  args.struct_size = XLA_FFI_DeviceOrdinal_Get_Args_STRUCT_SIZE;
  args.extension_start = nullptr;
  args.ctx = frame->ctx;
  args.device_ordinal = -1;
  if (Drop(frame->api, frame->api->XLA_FFI_DeviceOrdinal_Get(&args))) return -1;
  return args.device_ordinal;
}

/// Data pointers of buffers, on the stack where they are few. An ordered call has
/// a token before its operands and results; it has no data, and is skipped.
class Pointers {
 public:
  template <typename List>
  Pointers(const List& list, void* const* items, size_t wanted) {
    const size_t size = static_cast<size_t>(list.size);
    ok_ = size == wanted || size == wanted + 1;
    if (!ok_) return;
    const size_t first = size - wanted;
    if (wanted > kInline) heap_.reset(new void*[wanted]);
    for (size_t i = 0; i < wanted; ++i) {
      data()[i] = static_cast<const XLA_FFI_Buffer*>(items[first + i])->data;
    }
  }
  bool ok() const { return ok_; }
  void** data() { return heap_ ? heap_.get() : inline_; }

 private:
  static constexpr size_t kInline = 8;
  bool ok_;
  void* inline_[kInline];
  std::unique_ptr<void*[]> heap_;
};

inline int64_t RunId(const XLA_FFI_CallFrame* frame) {
  XLA_FFI_RunId_Get_Args args;
  args.struct_size = XLA_FFI_RunId_Get_Args_STRUCT_SIZE;
  args.extension_start = nullptr;
  args.ctx = frame->ctx;
  args.run_id = 0;
  Drop(frame->api, frame->api->XLA_FFI_RunId_Get(&args));
  return args.run_id;
}

/// XLA's stream on a GPU; null where there is none.
inline void* StreamOf(const XLA_FFI_CallFrame* frame) {
  XLA_FFI_Stream_Get_Args args;
  args.struct_size = XLA_FFI_Stream_Get_Args_STRUCT_SIZE;
  args.extension_start = nullptr;
  args.ctx = frame->ctx;
  args.stream = nullptr;
  if (Drop(frame->api, frame->api->XLA_FFI_Stream_Get(&args))) return nullptr;
  return args.stream;
}

inline const char* ClosedText() {
  return Engine::Get().forked()
             ? "hostcall: this process was forked from one that had started "
               "JAX, whose threads do not exist here. Start workers with "
               "multiprocessing's 'spawn' or 'forkserver' method"
             : "hostcall: the interpreter is shutting down, and Python can't be "
               "called any more. Wait for your programs "
               "(jax.block_until_ready) before the script ends";
}

template <typename Body>
XLA_FFI_Error* Guarded(XLA_FFI_CallFrame* frame, Body body,
                       XLA_FFI_TypeId state_type = XLA_FFI_UNKNOWN_TYPE_ID,
                       uint32_t traits = 0) {
  if (AnswerMetadata(frame, state_type, traits)) return nullptr;
  const Detached detached;
  try {
    return body(frame);
  } catch (const std::exception& e) {
    std::string text = e.what();
    if (text.rfind("hostcall: ", 0) != 0) text = "hostcall: " + text;
    return MakeError(frame->api, text);
  }
}

}  // namespace hostcall
