// The attributes of a custom call. A program from elsewhere may have any number of
// them, with any names and types.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "handlers/ffi.h"

namespace hostcall {
void* GilRelease::Release() { return nullptr; }
void GilRelease::Restore(void*) {}
}  // namespace hostcall

namespace {

constexpr const char* kNames[] = {"key", "count", "text", "block", ""};

/// The attributes of one call, and what they point to.
struct Attributes {
  std::deque<std::string> texts;
  std::deque<XLA_FFI_ByteSpan> spans;
  std::deque<XLA_FFI_Scalar> scalars;
  std::deque<uint64_t> numbers;
  std::vector<XLA_FFI_ByteSpan*> names;
  std::vector<XLA_FFI_AttrType> types;
  std::vector<void*> values;

  XLA_FFI_ByteSpan* Span(const std::string& text) {
    texts.push_back(text);
    spans.push_back({texts.back().data(), texts.back().size()});
    return &spans.back();
  }
  void Add(const std::string& name, uint8_t kind, const std::string& rest) {
    names.push_back(Span(name));
    types.push_back(kind % 3 == 0   ? XLA_FFI_AttrType_STRING
                    : kind % 3 == 1 ? XLA_FFI_AttrType_SCALAR
                                    : XLA_FFI_AttrType_DICTIONARY);
    if (kind % 3 != 1) {
      values.push_back(Span(rest));
      return;
    }
    numbers.push_back(0);
    std::memcpy(&numbers.back(), rest.data(), std::min<size_t>(rest.size(), 8));
    const auto dtype = static_cast<XLA_FFI_DataType>(kind / 3 % 16);
    scalars.push_back({dtype, &numbers.back()});
    values.push_back(&scalars.back());
  }
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Attributes all;
  while (size >= 3) {
    const size_t length = std::min<size_t>(data[2], size - 3);
    const std::string rest(reinterpret_cast<const char*>(data + 3), length);
    all.Add(data[0] % 6 == 5 ? rest : kNames[data[0] % 6 % 5], data[1], rest);
    data += 3 + length;
    size -= 3 + length;
  }
  XLA_FFI_CallFrame frame = {};
  frame.attrs.size = static_cast<int64_t>(all.names.size());
  frame.attrs.names = all.names.data();
  frame.attrs.types = all.types.data();
  frame.attrs.attrs = all.values.data();
  for (const char* name : kNames) {
    const uint64_t number = hostcall::Attribute(&frame, name);
    const XLA_FFI_ByteSpan* text = hostcall::TextAttribute(&frame, name);
    bool found = false, has_number = false;
    for (size_t i = 0; i < all.names.size(); ++i) {
      if (std::string(all.names[i]->ptr, all.names[i]->len) != name) continue;
      if (all.types[i] == XLA_FFI_AttrType_STRING && !found) {
        found = true;
        if (text != all.values[i]) std::abort();
      }
      has_number |= all.types[i] == XLA_FFI_AttrType_SCALAR;
    }
    if (!found && text != nullptr) std::abort();
    if (!has_number && number != 0) std::abort();
  }
  return 0;
}
