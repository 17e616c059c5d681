// What the two files of instructions share (decode.cc, memory_ops.cc).
#pragma once

#include <tuple>
#include <utility>

#include "numbers.h"
#include "warp.h"

namespace ptx {

struct Type {
  std::string_view name;
  char kind = 0;  // u, s, b (bits), f
  int bits = 0;
};

inline Type TypeNamed(std::string_view name) {
  Type type{name, 0, 0};
  if (name == "pred") return Type{name, 'p', 1};
  if (name == "bf16") return Type{name, 'f', 16};
  if (name == "f16x2" || name == "bf16x2") return Type{name, 'f', 32};
  if (name.size() < 2 ||
      std::string_view("usbf").find(name[0]) == std::string_view::npos)
    return type;
  for (const char digit : name.substr(1)) {
    if (digit < '0' || digit > '9') return Type{name, 0, 0};
    type.bits = 10 * type.bits + digit - '0';
  }
  type.kind = name[0];
  return type;
}

/// The parts of an opcode after its name, each of which has to be taken by
/// somebody.
class Parts {
 public:
  explicit Parts(const std::vector<std::string_view>& texts)
      : texts_(texts), taken_(texts.size()) {
    taken_[0] = true;
  }
  bool Has(std::string_view part) const {
    for (size_t i = 1; i < texts_.size(); ++i)
      if (texts_[i] == part) return true;
    return false;
  }
  bool Take(std::string_view part) {
    for (size_t i = 1; i < texts_.size(); ++i)
      if (!taken_[i] && texts_[i] == part) return taken_[i] = true;
    return false;
  }
  /// Takes parts that begin so.
  void TakeAll(std::string_view begin) {
    for (size_t i = 1; i < texts_.size(); ++i)
      if (texts_[i].substr(0, begin.size()) == begin) taken_[i] = true;
  }
  std::string_view at(size_t i) const { return texts_[i]; }
  std::string_view last() const { return texts_.back(); }
  size_t count() const { return texts_.size(); }
  Type type() const { return TypeNamed(texts_.back()); }
  /// The handler, unless something of the opcode was not taken.
  Handler End(Handler found, bool typed = false) {
    if (typed) taken_.back() = true;
    for (const bool taken : taken_)
      if (!taken) return nullptr;
    return found;
  }

 private:
  const std::vector<std::string_view>& texts_;
  std::vector<bool> taken_;
};

// What the parser tells in `in.how`.
enum Form { kUsual = 0, kPacks = 1, kUnpacks = 2, kInFunction = 3 };

Handler DecodeMemory(Parts& parts, std::string_view op, Instr& in);
/// Copies `how` bytes of each lane's memory from `offset` to `target`.
Handler CopyLocal();

}  // namespace ptx
