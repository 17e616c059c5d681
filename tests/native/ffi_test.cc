// How handlers talk to XLA: to versions with fewer or more fields, and to errors.
#undef NDEBUG
#include "handlers/ffi.h"

#include <pthread.h>

#include <cassert>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <stdexcept>
#include <string>
#include <type_traits>

struct XLA_FFI_Error {
  std::string text;
  XLA_FFI_Error_Code code;
};

namespace hostcall {

void* GilRelease::Release() { return nullptr; }
void GilRelease::Restore(void*) {}

namespace {

int g_errors = 0;  // XLA_FFI_Errors that exist
int g_ordinal = 3;
int64_t g_run = 0;
bool g_fails = false;

XLA_FFI_Error* NewError(const std::string& text) {
  ++g_errors;
  return new XLA_FFI_Error{text, XLA_FFI_Error_Code_INTERNAL};
}
XLA_FFI_Error* Create(XLA_FFI_Error_Create_Args* args) {
  ++g_errors;
  return new XLA_FFI_Error{args->message, args->errc};
}
void Destroy(XLA_FFI_Error_Destroy_Args* args) {
  --g_errors;
  delete args->error;
}
XLA_FFI_Error* Ordinal(XLA_FFI_DeviceOrdinal_Get_Args* args) {
  if (g_fails) return NewError("no ordinal");
  args->device_ordinal = g_ordinal;
  return nullptr;
}
XLA_FFI_Error* Run(XLA_FFI_RunId_Get_Args* args) {
  if (g_fails) return NewError("no run");
  args->run_id = g_run;
  return nullptr;
}
XLA_FFI_Error* Stream(XLA_FFI_Stream_Get_Args* args) {
  if (g_fails) return NewError("no stream");
  args->stream = &g_run;
  return nullptr;
}
XLA_FFI_Error* Set(XLA_FFI_State_Set_Args*) { return nullptr; }
XLA_FFI_Error* Get(XLA_FFI_State_Get_Args*) { return nullptr; }

/// An XLA of the headers' version, and one of its call frames.
struct Xla {
  Xla() {
    api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
    api.api_version.struct_size = XLA_FFI_Api_Version_STRUCT_SIZE;
    api.api_version.major_version = XLA_FFI_API_MAJOR;
    api.api_version.minor_version = XLA_FFI_API_MINOR;
    api.XLA_FFI_Error_Create = Create;
    api.XLA_FFI_Error_Destroy = Destroy;
    api.XLA_FFI_DeviceOrdinal_Get = Ordinal;
    api.XLA_FFI_RunId_Get = Run;
    api.XLA_FFI_Stream_Get = Stream;
    api.XLA_FFI_State_Set = Set;
    api.XLA_FFI_State_Get = Get;
    frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
    frame.api = &api;
    frame.args.struct_size = XLA_FFI_Args_STRUCT_SIZE;
    frame.rets.struct_size = XLA_FFI_Rets_STRUCT_SIZE;
    frame.attrs.struct_size = XLA_FFI_Attrs_STRUCT_SIZE;
  }
  XLA_FFI_Api api = {};
  XLA_FFI_CallFrame frame = {};
};

bool Has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// Destroys an error, and returns its text.
std::string Taken(XLA_FFI_Error* error) {
  assert(error != nullptr);
  const std::string text = error->text;
  --g_errors;
  delete error;
  return text;
}

// --- Metadata -------------------------------------------------------------------

using Base = std::remove_pointer_t<decltype(XLA_FFI_CallFrame::extension_start)>;

struct Question {
  Question() {
    metadata.struct_size = XLA_FFI_Metadata_STRUCT_SIZE;
    metadata.api_version.major_version = -7;
    extension.extension_base.struct_size = XLA_FFI_Metadata_Extension_STRUCT_SIZE;
    extension.extension_base.type = XLA_FFI_Extension_Metadata;
    extension.metadata = &metadata;
    // As XLA asks, which passes no interface then.
    frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
    frame.extension_start = &extension.extension_base;
  }
  bool IsAnswered() const {
    return metadata.api_version.major_version == XLA_FFI_API_MAJOR &&
           metadata.api_version.minor_version == XLA_FFI_API_MINOR &&
           metadata.traits == 5 && metadata.state_type_id.type_id == 42;
  }
  bool IsUntouched() const { return metadata.api_version.major_version == -7; }
  XLA_FFI_Metadata metadata = {};
  XLA_FFI_Metadata_Extension extension = {};
  XLA_FFI_CallFrame frame = {};
};

void MetadataIsFoundBehindOtherExtensions() {
  for (int before : {0, 1, 5}) {
    Question question;
    Base others[5] = {};
    for (int i = 0; i < before; ++i) {
      others[i].struct_size = sizeof(Base) + 8;
      others[i].type = static_cast<decltype(Base::type)>(0);
      others[i].next =
          i + 1 < before ? &others[i + 1] : &question.extension.extension_base;
    }
    if (before != 0) question.frame.extension_start = others;
    assert(AnswerMetadata(&question.frame, {42}, 5) && question.IsAnswered());
    question.extension.extension_base.type = others[0].type;
    assert(!AnswerMetadata(&question.frame, {42}, 5));
  }
  Xla xla;
  assert(!AnswerMetadata(&xla.frame, {42}, 5));  // a call, not a question
}

void MetadataThatIsTooSmallIsLeftAlone() {
  Question small;
  small.extension.extension_base.struct_size = sizeof(Base);
  assert(AnswerMetadata(&small.frame, {42}, 5) && small.IsUntouched());
  Question smaller;
  smaller.metadata.struct_size = offsetof(XLA_FFI_Metadata, traits);
  assert(AnswerMetadata(&smaller.frame, {42}, 5) && smaller.IsUntouched());
  Question large;
  large.extension.extension_base.struct_size += 64;
  large.metadata.struct_size += 64;
  assert(AnswerMetadata(&large.frame, {42}, 5) && large.IsAnswered());
  Question asked;
  assert(Guarded(
             &asked.frame,
             [](XLA_FFI_CallFrame*) -> XLA_FFI_Error* { std::abort(); }, {42},
             5) == nullptr);
  assert(asked.IsAnswered());
}

// --- Versions -------------------------------------------------------------------

void ALaterMajorVersionIsRefused() {
  Xla xla;
  CheckInterface(&xla.frame);
  xla.api.struct_size += 64;
  xla.api.api_version.minor_version += 7;
  CheckInterface(&xla.frame);
  xla.api.api_version.major_version = 1;
  const std::string text =
      Taken(Guarded(&xla.frame, [](XLA_FFI_CallFrame* f) -> XLA_FFI_Error* {
        CheckInterface(f);
        return nullptr;
      }));
  assert(Has(text, "this jaxlib has version 1 of XLA's FFI interface"));
  assert(Has(text, "install the newest hostcall, or a jaxlib"));
}

// --- What XLA says, or doesn't -------------------------------------------------

XLA_FFI_Error* AskOrdinal(XLA_FFI_CallFrame* frame) {
  return MakeError(frame->api, std::to_string(DeviceOrdinal(frame)));
}
XLA_FFI_Error* AskRun(XLA_FFI_CallFrame* frame) {
  return MakeError(frame->api, std::to_string(RunId(frame)));
}

void OrdinalsAndRuns() {
  Xla xla;
  g_ordinal = 0;
  g_run = 0;
  assert(Taken(Guarded(&xla.frame, AskOrdinal)) == "0");
  assert(Taken(Guarded(&xla.frame, AskRun)) == "0");  // 0 is a valid run
  assert(StreamOf(&xla.frame) == &g_run);
  g_ordinal = -1;  // would stand for an eager call
  assert(Has(Taken(Guarded(&xla.frame, AskOrdinal)),
             "did not report which device this is"));
  g_fails = true;
  assert(Taken(Guarded(&xla.frame, AskOrdinal)) == "no ordinal");
  assert(Taken(Guarded(&xla.frame, AskRun)) == "no run");
  assert(StreamOf(&xla.frame) == nullptr);  // and its error is destroyed
  g_fails = false;
  assert(g_errors == 0);
}

// --- What is thrown ------------------------------------------------------------

struct Own {};

void NothingThrownReachesXla() {
  Xla xla;
  const auto text = [&xla](const std::function<void()>& body) {
    return Taken(Guarded(&xla.frame, [&body](XLA_FFI_CallFrame*) -> XLA_FFI_Error* {
      body();
      return nullptr;
    }));
  };
  assert(text([] { throw std::runtime_error("bad"); }) == "hostcall: bad");
  assert(text([] { throw std::runtime_error("hostcall: bad"); }) ==
         "hostcall: bad");
  const char* rest = "threw an object that is not a std::exception";
  assert(Has(text([] { throw 7; }), rest));
  assert(Has(text([] { throw "text"; }), rest));
  assert(Has(text([] { throw std::string("text"); }), rest));
  assert(Has(text([] { throw Own{}; }), rest));
  assert(Guarded(&xla.frame, [](XLA_FFI_CallFrame*) -> XLA_FFI_Error* {
           return nullptr;
         }) == nullptr);
  assert(g_errors == 0);
}

void ATypeNewerThanTheTableIsFound() {
  int64_t dims[] = {3};
  XLA_FFI_Buffer known = {}, newer = {};
  known.dtype = XLA_FFI_DataType_F32;
  newer.dtype = static_cast<XLA_FFI_DataType>(sizeof kBitsOfTypes);
  known.rank = newer.rank = 1;
  known.dims = newer.dims = dims;
  void* items[] = {&known, &newer};
  XLA_FFI_Args args = {};
  args.size = 1;
  assert(!UnknownType(args, items));
  args.size = 2;
  assert(UnknownType(args, items) == static_cast<int>(sizeof kBitsOfTypes));
  assert(BytesOf(known) == 12 && BytesOf(newer) == 0);
  const auto last = XLA_FFI_DataType_F8E8M0FNU;
  assert(IsKnown(last) && !IsKnown(static_cast<XLA_FFI_DataType>(last + 1)));
}

bool g_unwound = false, g_went_on = false;

void* Ends(void*) {
  struct Notes {
    ~Notes() { g_unwound = true; }
  };
  Xla xla;
  XLA_FFI_Error* error =
      Guarded(&xla.frame, [](XLA_FFI_CallFrame*) -> XLA_FFI_Error* {
        Notes notes;
        pthread_exit(nullptr);
      });
  g_went_on = true;
  return error;
}

void AThreadThatEndsItselfIsLetGo() {
  pthread_t thread;
  assert(pthread_create(&thread, nullptr, Ends, nullptr) == 0);
  void* result = &thread;
  assert(pthread_join(thread, &result) == 0);
  assert(result == nullptr && g_unwound && !g_went_on && g_errors == 0);
}

}  // namespace
}  // namespace hostcall

int main() {
  using namespace hostcall;
  MetadataIsFoundBehindOtherExtensions();
  MetadataThatIsTooSmallIsLeftAlone();
  ALaterMajorVersionIsRefused();
  OrdinalsAndRuns();
  NothingThrownReachesXla();
  ATypeNewerThanTheTableIsFound();
  AThreadThatEndsItselfIsLetGo();
  std::printf("ffi: all held, of version %d.%d\n", XLA_FFI_API_MAJOR,
              XLA_FFI_API_MINOR);
}
