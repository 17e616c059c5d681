// What the interpreter makes of PTX, NVIDIA's text of machine instructions: each
// kernel is an array of instructions whose operands are places in the registers of
// a warp.
//
// A warp is 32 threads ("lanes") that run together. A register is a row: one value
// of each lane, side by side, so that an instruction is one loop over 32 values,
// which the compiler turns into vector instructions. A predicate is a mask of 32
// bits.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace ptx {

constexpr int kLanes = 32;

struct Warp;
struct Instr;
using Handler = void (*)(Warp&, const Instr&);

/// Where an operand is. Immediates are rows of constants, which all warps share.
struct Operand {
  uint32_t at = 0;   // of the row, in bytes
  uint8_t bits = 0;  // of a value in the row; 1: a predicate
  bool constant = false;
  bool negated = false;  // a predicate that is read as its opposite
};
constexpr uint32_t kNowhere = ~0u;  // `at` of an operand that is left out (`_`)

enum class Space : uint8_t { kGlobal, kShared, kLocal, kParam, kGeneric };

/// What `in.how` means depends on the instruction.
struct Instr {
  Handler run = nullptr;
  Handler inner = nullptr;  // of one that runs in another rounding mode
  Operand guard;            // runs where it is true; kNowhere: everywhere
  Operand ops[10];
  uint8_t count = 0;  // of operands; of a vector's elements, for memory
  Space space = Space::kGeneric;
  uint8_t bytes = 0;  // of a value in memory
  bool is_signed = false;
  int how = 0;
  int64_t offset = 0;   // of an address
  uint32_t target = 0;  // of a jump
  const std::vector<uint32_t>* targets = nullptr;
  int line = 0;  // in the module's text
};

enum class Special : uint8_t {
  kTidX,
  kTidY,
  kTidZ,
  kNtidX,
  kNtidY,
  kNtidZ,
  kCtaidX,
  kCtaidY,
  kCtaidZ,
  kNctaidX,
  kNctaidY,
  kNctaidZ,
  kLaneid,
  kWarpid,
  kNwarpid,
  kLanemaskEq,
  kLanemaskLt,
  kLanemaskLe,
  kLanemaskGt,
  kLanemaskGe,
  kClock,
  kZero,
  kDynamicShared
};

struct Param {
  std::string name;
  uint32_t at, bytes;
};

struct Kernel {
  std::string name;
  std::vector<Instr> code;
  uint32_t entry = 0;
  std::vector<Param> params;
  uint32_t param_bytes = 0;
  std::vector<char> constants;  // rows
  std::vector<std::pair<Special, uint32_t>>
      specials;  // rows that a warp begins with
  uint32_t register_bytes = 0;
  uint32_t shared_bytes = 0;  // without what the launch adds
  uint32_t local_bytes = 0;   // of a lane
  bool has_barrier = false;
  std::vector<std::unique_ptr<std::vector<uint32_t>>> tables;  // of indirect jumps
  /// Instructions that the interpreter does not know, with how often they stand
  /// there.
  std::map<std::string, int> unknown;
};

struct Variable {
  std::string name;
  std::vector<char> bytes;
  char* at = nullptr;  // where it is while the module is loaded
  /// Places in it that hold the address of another variable.
  std::vector<std::pair<size_t, std::string>> addresses;
};

struct Module {
  std::map<std::string, Variable> globals;
  std::map<std::string, std::unique_ptr<Kernel>> kernels;
};

/// Whether the data is a module's text, and not machine code.
bool IsText(const void* data);

/// Reads a module. `place` returns memory for a variable of so many bytes.
std::unique_ptr<Module> Parse(const char* text, char* (*place)(size_t bytes));

/// The handler of an instruction, whose operands are known; null if there is none.
/// It sets what of the instruction the opcode says. `parts` is the opcode, split at
/// dots.
Handler Decode(const std::vector<std::string_view>& parts, Instr& in);

}  // namespace ptx
