// The parts of XLA's C interface that every handler needs.
//
// Versions. XLA's structs hold their own size, since a newer XLA may have more
// members and an older one fewer. When a handler is registered, XLA asks for the
// version of the headers that it was built with, and refuses it if that is newer
// than its own (IsSupportedApiVersion in xla/ffi/ffi_registry.cc). Within a major
// version members are only added, so all that handlers use are there. A later major
// version is refused here, when a place of a program is instantiated.
//
// Does not depend on Python (tests/native/ffi_test.cc has its own XLA).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>
#if defined(__GLIBCXX__)
#include <cxxabi.h>
#endif

#include "base/code.h"
#include "base/engine.h"
#include "base/gil_release.h"
#include "base/small_array.h"
#include "xla/ffi/api/c_api.h"

namespace hostcall {

/// Makes an error that XLA owns once a handler returns it. XLA copies the text.
inline XLA_FFI_Error* MakeError(
    const XLA_FFI_Api* api, const std::string& text,
    XLA_FFI_Error_Code code = XLA_FFI_Error_Code_INTERNAL) {
  XLA_FFI_Error_Create_Args args = {XLA_FFI_Error_Create_Args_STRUCT_SIZE, nullptr,
                                    text.c_str(), code};
  return api->XLA_FFI_Error_Create(&args);
}

inline constexpr char kBufferMismatch[] =
    "hostcall: the program passes a different number of buffers than it was "
    "lowered with";

/// The minor version of XLA's interface that handlers say they were built for: an
/// older XLA refuses a newer one. Set once, before the handlers are registered.
inline int g_interface_minor = XLA_FFI_API_MINOR;

/// Answers XLA's question at registration, which interface the handler was built
/// for. Returns false if the frame is not that question but a call.
inline bool AnswerMetadata(const XLA_FFI_CallFrame* frame,
                           XLA_FFI_TypeId state_type, uint32_t traits = 0) {
  using Base = std::remove_pointer_t<decltype(frame->extension_start)>;
  for (Base* base = frame->extension_start; base != nullptr; base = base->next) {
    if (base->type != XLA_FFI_Extension_Metadata) continue;
    auto* extension = reinterpret_cast<XLA_FFI_Metadata_Extension*>(base);
    // No error can be returned, since the frame has no interface yet. An XLA that
    // finds no version in the answer refuses the handler.
    if (base->struct_size < XLA_FFI_Metadata_Extension_STRUCT_SIZE) return true;
    XLA_FFI_Metadata* metadata = extension->metadata;
    if (metadata->struct_size < XLA_FFI_Metadata_STRUCT_SIZE) return true;
    metadata->api_version.major_version = XLA_FFI_API_MAJOR;
    metadata->api_version.minor_version = g_interface_minor;
    metadata->traits = traits;
    metadata->state_type_id = state_type;  // not in STRUCT_SIZE, in any version
    return true;
  }
  return false;
}

// The first version that has everything that handlers use (jaxlib 0.9.0), but for
// the stage of a state, which `StateArgs` adds.
static_assert(XLA_FFI_API_MAJOR == 0 && XLA_FFI_API_MINOR >= 2);

/// Throws unless this XLA has the interface that hostcall was built for.
inline void CheckInterface(const XLA_FFI_CallFrame* frame) {
  const int major = frame->api->api_version.major_version;
  if (major == XLA_FFI_API_MAJOR) return;
  throw std::runtime_error(
      "hostcall: this jaxlib has version " + std::to_string(major) +
      " of XLA's FFI interface, and hostcall was built for version " +
      std::to_string(XLA_FFI_API_MAJOR) +
      ": install the newest hostcall, or a jaxlib that this one "
      "supports" HOSTCALL_CODE("hc-device"));
}

/// Thrown in a handler to return an error that XLA made (Guarded catches it).
struct XlaError {
  XLA_FFI_Error* error;
};

/// The attribute of that name and type; null if the call has none.
inline const void* AttributeOf(const XLA_FFI_CallFrame* frame,
                               std::string_view name, XLA_FFI_AttrType type) {
  const XLA_FFI_Attrs& attrs = frame->attrs;
  for (int64_t i = 0; i < attrs.size; ++i) {
    if (std::string_view(attrs.names[i]->ptr, attrs.names[i]->len) == name &&
        attrs.types[i] == type) {
      return attrs.attrs[i];
    }
  }
  return nullptr;
}
/// A number; 0 if there is none of type uint64.
inline uint64_t Attribute(const XLA_FFI_CallFrame* frame, std::string_view name) {
  const auto* scalar = static_cast<const XLA_FFI_Scalar*>(
      AttributeOf(frame, name, XLA_FFI_AttrType_SCALAR));
  if (scalar == nullptr || scalar->dtype != XLA_FFI_DataType_U64) return 0;
  uint64_t value;
  std::memcpy(&value, scalar->value, sizeof value);
  return value;
}
/// A text, or null.
inline const XLA_FFI_ByteSpan* TextAttribute(const XLA_FFI_CallFrame* frame,
                                             std::string_view name) {
  return static_cast<const XLA_FFI_ByteSpan*>(
      AttributeOf(frame, name, XLA_FFI_AttrType_STRING));
}

/// Destroys an error that is not to be reported. Returns whether there was one.
inline bool Drop(const XLA_FFI_Api* api, XLA_FFI_Error* error) {
  if (error == nullptr) return false;
  XLA_FFI_Error_Destroy_Args args = {XLA_FFI_Error_Destroy_Args_STRUCT_SIZE,
                                     nullptr, error};
  api->XLA_FFI_Error_Destroy(&args);
  return true;
}

/// Calls a function of XLA's interface, and returns its arguments with what it
/// wrote there. Throws XlaError.
template <typename Args>
Args Query(XLA_FFI_Error* (*function)(Args*), Args args) {
  if (XLA_FFI_Error* error = function(&args)) throw XlaError{error};
  return args;
}

/// The arguments of XLA_FFI_State_Set and XLA_FFI_State_Get from interface 0.3
/// (jaxlib 0.9.1) on. The headers of 0.2 have them without the stage: there a state
/// belongs to the executable, which is what the stage of instantiation says.
struct StateArgs {
  size_t struct_size;
  void* extension_start;
  XLA_FFI_ExecutionContext* ctx;
  XLA_FFI_ExecutionStage stage;
  XLA_FFI_TypeId* type_id;
  void* state;
};
/// The same in interface 0.2.
struct StageLessStateArgs {
  size_t struct_size;
  void* extension_start;
  XLA_FFI_ExecutionContext* ctx;
  XLA_FFI_TypeId* type_id;
  void* state;
};
// XLA counts the members to the end of the last one, without padding behind it.
static_assert(sizeof(StateArgs) == offsetof(StateArgs, state) + sizeof(void*));
static_assert(sizeof(StageLessStateArgs) ==
              offsetof(StageLessStateArgs, state) + sizeof(void*));

/// Calls one of these two functions of XLA's as its version wants it; returns the
/// state. Throws XlaError.
///
/// `function` is declared by the headers that hostcall was built with. XLA's own
/// has the arguments of its version, whatever these are called there.
template <typename Args>
void* AskState(const XLA_FFI_CallFrame* frame, XLA_FFI_Error* (*function)(Args*),
               XLA_FFI_TypeId* type, void* state) {
  const auto call = [&](auto args) {
    auto* declared = reinterpret_cast<Args*>(&args);
    if (XLA_FFI_Error* error = function(declared)) throw XlaError{error};
    return args.state;
  };
  if (frame->api->api_version.minor_version < 3) {
    return call(StageLessStateArgs{sizeof(StageLessStateArgs), nullptr, frame->ctx,
                                   type, state});
  }
  return call(StateArgs{sizeof(StateArgs), nullptr, frame->ctx,
                        XLA_FFI_ExecutionStage_INSTANTIATE, type, state});
}

/// The ordinal of the device that the program runs on. Never -1, which the engine
/// uses for eager calls. Throws.
inline int DeviceOrdinal(const XLA_FFI_CallFrame* frame) {
  const int ordinal =
      Query(frame->api->XLA_FFI_DeviceOrdinal_Get,
            {XLA_FFI_DeviceOrdinal_Get_Args_STRUCT_SIZE, nullptr, frame->ctx, -1})
          .device_ordinal;
  if (ordinal >= 0) return ordinal;
  throw std::runtime_error("hostcall: XLA did not report which device this is");
}

/// XLA's number of this execution of the program. Throws.
inline int64_t RunId(const XLA_FFI_CallFrame* frame) {
  return Query(frame->api->XLA_FFI_RunId_Get,
               {XLA_FFI_RunId_Get_Args_STRUCT_SIZE, nullptr, frame->ctx, 0})
      .run_id;
}

/// Bits of one element of each of XLA's types, by XLA's numbers; 0 for a type that
/// no call takes. XLA has no number for its types of 6 bits, which take a byte
/// each.
inline constexpr uint8_t kBitsOfTypes[] = {
    8, 8, 8, 16, 32, 64, 8, 16, 32, 64,  // (none), PRED, S8..S64, U8..U64
    16, 32, 64, 0, 0, 64,                // F16..F64, 13, 14, C64
    16, 0, 128, 8, 8, 4, 4, 8,           // BF16, token, C128, F8E5M2, F8E4M3FN, S4,
                                         // U4, F8E4M3B11FNUZ
    8, 8, 2, 2, 8, 8, 1, 1,              // F8E5M2FNUZ, F8E4M3FNUZ, S2, U2, F8E4M3,
                                         // F8E3M4, S1, U1
    4, 8};                               // F4E2M1FN, F8E8M0FNU

/// Whether the type is older than hostcall's table of them.
inline bool IsKnown(XLA_FFI_DataType type) {
  return static_cast<size_t>(type) < sizeof kBitsOfTypes;
}

/// Bits of one element; 0 for a type that no call takes, and for an unknown one.
inline int64_t BitsOf(XLA_FFI_DataType type) {
  return IsKnown(type) ? kBitsOfTypes[static_cast<size_t>(type)] : 0;
}

/// The first unknown type among the buffers of a list, or nothing.
template <typename List>
std::optional<int> UnknownType(const List& list, void* const* items) {
  for (int64_t i = 0; i < list.size; ++i) {
    const XLA_FFI_DataType type =
        static_cast<const XLA_FFI_Buffer*>(items[i])->dtype;
    if (!IsKnown(type)) return static_cast<int>(type);
  }
  return std::nullopt;
}

/// Bytes of a buffer in XLA's layout.
inline size_t BytesOf(const XLA_FFI_Buffer& buffer) {
  int64_t elements = 1;
  for (int64_t i = 0; i < buffer.rank; ++i) elements *= buffer.dims[i];
  return static_cast<size_t>((elements * BitsOf(buffer.dtype) + 7) / 8);
}

/// Whether the last buffers of a list have these sizes. A number or a token that
/// only orders the call may be in front of them.
template <typename List>
bool Fit(const std::vector<size_t>& bytes, const List& list, void* const* items) {
  const auto size = static_cast<size_t>(list.size);
  if (size != bytes.size() && size != bytes.size() + 1) return false;
  items += size - bytes.size();
  for (size_t i = 0; i < bytes.size(); ++i) {
    if (BytesOf(*static_cast<const XLA_FFI_Buffer*>(items[i])) != bytes[i]) {
      return false;
    }
  }
  return true;
}

/// The data pointers of a call's buffers, of which Fit has found `wanted`. A number
/// or a token that only orders the call may be in front of them, and is skipped.
class Pointers {
 public:
  template <typename List>
  Pointers(const List& list, void* const* items, size_t count) : data_(count) {
    const size_t first = static_cast<size_t>(list.size) - count;
    for (size_t i = 0; i < count; ++i) {
      data()[i] = static_cast<const XLA_FFI_Buffer*>(items[first + i])->data;
    }
  }
  void** data() { return data_.data(); }
  void* operator[](size_t i) { return data()[i]; }

 private:
  SmallArray<void*, 8> data_;
};

/// The operand and the result of a link, each one number. Throws.
inline std::pair<void*, void*> NumbersOfLink(const XLA_FFI_CallFrame* frame) {
  const std::vector<size_t> number{sizeof(int32_t)};
  if (Fit(number, frame->args, frame->args.args) &&
      Fit(number, frame->rets, frame->rets.rets)) {
    return {Pointers(frame->args, frame->args.args, 1)[0],
            Pointers(frame->rets, frame->rets.rets, 1)[0]};
  }
  throw std::runtime_error(
      "hostcall: a link has one int32 as operand and as result, and the program "
      "passes other arrays. It was changed after hostcall made "
      "it" HOSTCALL_CODE("hc-load"));
}

/// XLA's stream on a GPU; null if the platform has none.
inline void* StreamOf(const XLA_FFI_CallFrame* frame) {
  XLA_FFI_Stream_Get_Args args = {XLA_FFI_Stream_Get_Args_STRUCT_SIZE, nullptr,
                                  frame->ctx, nullptr};
  if (Drop(frame->api, frame->api->XLA_FFI_Stream_Get(&args))) return nullptr;
  return args.stream;
}

/// Why the engine refuses a call.
inline const char* ClosedText() {
  return Engine::Get().forked()
             ? "hostcall: this process was forked from one that had started "
               "JAX, whose threads do not exist here. Start workers with "
               "multiprocessing's 'spawn' or 'forkserver' method" HOSTCALL_CODE(
                   "hc-process")
             : "hostcall: the interpreter is shutting down, and Python can't be "
               "called any more. Wait for your programs "
               "(jax.block_until_ready) before the script ends" HOSTCALL_CODE(
                   "hc-closed");
}

/// The error of a call that the engine refuses.
inline XLA_FFI_Error* ClosedError(const XLA_FFI_CallFrame* frame) {
  return MakeError(frame->api, ClosedText(),
                   XLA_FFI_Error_Code_FAILED_PRECONDITION);
}

/// The last `catch` of a list, for everything that is not a std::exception: native
/// code of users may throw anything. glibc ends a thread (pthread_exit,
/// pthread_cancel) by an exception as well. That one must be thrown on: glibc
/// aborts the process if a handler keeps it.
#if defined(__GLIBCXX__)
#define HOSTCALL_CATCH_THE_REST         \
  catch (const abi::__forced_unwind&) { \
    throw;                              \
  }                                     \
  catch (...)
#else
#define HOSTCALL_CATCH_THE_REST catch (...)
#endif

/// The text for an exception that HOSTCALL_CATCH_THE_REST caught.
inline std::string TextOfTheRest() {
  return "hostcall: native code threw an object that is not a std::exception. "
         "Report errors by its status (hc.buffers.native(..., "
         "status=True))" HOSTCALL_CODE("hc-buffer");
}

/// The exception's text, marked as hostcall's.
inline std::string TextOf(const std::exception& error) {
  const std::string text = error.what();
  return text.rfind("hostcall: ", 0) == 0 ? text : "hostcall: " + text;
}

/// Runs the body of a handler: answers XLA's question for the version, releases the
/// GIL, and turns exceptions into errors for XLA. The only exception that leaves it
/// is the one with which glibc ends the thread.
template <typename Body>
XLA_FFI_Error* Guarded(XLA_FFI_CallFrame* frame, Body body,
                       XLA_FFI_TypeId state_type = XLA_FFI_UNKNOWN_TYPE_ID,
                       uint32_t traits = 0) {
  if (AnswerMetadata(frame, state_type, traits)) return nullptr;
  const GilRelease unlocked;
  try {
    return body(frame);
  } catch (const XlaError& failure) {
    return failure.error;
  } catch (const std::exception& error) {
    return MakeError(frame->api, TextOf(error));
  }
  HOSTCALL_CATCH_THE_REST { return MakeError(frame->api, TextOfTheRest()); }
}

}  // namespace hostcall
