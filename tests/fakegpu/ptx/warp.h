// A warp, and the block of threads that it belongs to, while they run.
#pragma once

#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "program.h"

namespace ptx {

/// A kernel did what it may not do. The text begins with what it did.
struct KernelFault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// A piece of memory that a kernel may use, and what it did with it.
struct Range {
  char *begin, *end;
  // XLA reads numbers of less than a byte with their neighbours, which there may be
  // none of, and changes a byte in the word that it is in. Words end where memory
  // does.
  char* end_of_word;
  char *read_from = nullptr, *read_to = nullptr;
  char *written_from = nullptr, *written_to = nullptr;
};

enum class Access { kRead, kWrite, kAtomic };

/// The memory that a launch may use. `find` asks the driver for the block that an
/// address lies in; its answers are kept, since no block is freed while a kernel
/// may use it.
struct Memory {
  virtual ~Memory() = default;
  /// False if the address is in no block.
  virtual bool Find(const char* at, Range& range) = 0;

  std::vector<Range> ranges;  // few: as many as a kernel has arguments
  size_t last = 0;

  Range* RangeOf(const char* at) {
    if (last < ranges.size() && at >= ranges[last].begin &&
        at < ranges[last].end_of_word)
      return &ranges[last];
    for (size_t i = 0; i < ranges.size(); ++i) {
      if (at < ranges[i].begin || at >= ranges[i].end_of_word) continue;
      last = i;
      return &ranges[i];
    }
    Range found{};
    if (!Find(at, found)) return nullptr;
    ranges.push_back(found);
    last = ranges.size() - 1;
    return &ranges[last];
  }
  /// Notes an access; throws if it is out of bounds.
  void Check(const char* from, const char* to, Access access);
};

struct Dim {
  unsigned x = 1, y = 1, z = 1;
};

/// A launch: what all blocks share.
struct Launch {
  const Kernel* kernel;
  Dim grid, block;
  uint32_t dynamic_shared = 0;
  std::vector<char> params;
  Memory* memory;
};

struct Block {
  const Launch* launch;
  Dim index;
  std::vector<char> shared;
};

/// Lanes that are at another place than those that run.
struct Group {
  enum State : uint8_t { kReady, kAtBarrier, kAwaited };
  uint32_t mask, at, needed;
  State state;
};

struct Warp {
  char* rows[2];    // registers, constants
  uint32_t active;  // lanes for which the instruction runs
  uint32_t mask;    // lanes at this place
  uint32_t live;    // lanes that have not ended
  uint32_t at, next;
  uint32_t others;  // the lowest place of other lanes that could run
  uint32_t carry = 0;
  Block* block;
  Memory* memory;
  char* local;  // memory of lanes, one after the other
  uint32_t local_bytes;
  unsigned number;  // in its block
  std::vector<Group> groups;

  template <typename T>
  T* Row(const Operand& operand) {
    return reinterpret_cast<T*>(rows[operand.constant] + operand.at);
  }
  uint32_t Mask(const Operand& predicate) {
    const uint32_t mask = *Row<uint32_t>(predicate);
    return predicate.negated ? ~mask : mask;
  }
  void SetMask(const Operand& predicate, uint32_t mask) {
    uint32_t* const row = Row<uint32_t>(predicate);
    *row = (*row & ~active) | (mask & active);
  }
  /// A lane's value, whatever the width of its register.
  uint64_t Value(const Operand& operand, int lane) {
    switch (operand.bits) {
      case 16:
        return Row<uint16_t>(operand)[lane];
      case 32:
        return Row<uint32_t>(operand)[lane];
      default:
        return Row<uint64_t>(operand)[lane];
    }
  }
  void Set(const Operand& operand, int lane, uint64_t value) {
    if (operand.at == kNowhere) return;
    switch (operand.bits) {
      case 16:
        Row<uint16_t>(operand)[lane] = static_cast<uint16_t>(value);
        return;
      case 32:
        Row<uint32_t>(operand)[lane] = static_cast<uint32_t>(value);
        return;
      default:
        Row<uint64_t>(operand)[lane] = value;
    }
  }

  void Begin(Block* its_block, unsigned its_number);
  /// Runs until all lanes have ended, or wait at a barrier.
  void Run();
  bool ended() const { return live == 0; }
  void PassBarrier();
  /// Whether all lanes of `needed` are here. If not, these wait for them.
  bool Gathered(uint32_t needed);
  /// The active lanes jump.
  void Jump(uint32_t target);
  void Stop(Group::State state, uint32_t where, uint32_t needed);
  void End();

 private:
  /// Chooses who runs next. Returns false if nobody can.
  bool Choose();
};

template <typename F>
inline void ForLanes(uint32_t active, F f) {
  if (active == ~0u) {
#pragma GCC ivdep
    for (int lane = 0; lane < kLanes; ++lane) f(lane);
    return;
  }
  for (; active != 0; active &= active - 1) f(__builtin_ctz(active));
}

/// Runs all blocks of a launch, one after the other. Throws KernelFault.
void Run(const Launch& launch);

}  // namespace ptx
