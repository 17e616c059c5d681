// Runs kernels: blocks one after the other, the warps of a block from barrier to
// barrier, the lanes of a warp together while they are at the same place.
//
// Where lanes take different ways, those at the lowest place in the code run, until
// they come to where others wait. Compilers put code that lanes share behind what
// leads to it, so that lanes meet again soon.
#include <algorithm>

#include "warp.h"

namespace ptx {

void Memory::Check(const char* from, const char* to, Access access) {
  const bool writes = access != Access::kRead;
  Range* const range = RangeOf(from);
  if (range == nullptr)
    throw KernelFault(std::string(writes ? "writes" : "reads") +
                      " memory that no block has");
  if (to > (access == Access::kWrite ? range->end : range->end_of_word)) {
    // Arguments cut a block into ranges; an access may begin in one and end in the
    // next.
    char* const middle = range->end;
    const Range* const next = from < middle ? RangeOf(middle) : nullptr;
    if (next == nullptr || next->begin != middle)
      throw KernelFault(std::string(writes ? "writes" : "reads") +
                        " past the end of a block");
    Check(from, middle, access);
    return Check(middle, to, access);
  }
  char*& first = writes ? range->written_from : range->read_from;
  char*& last_byte = writes ? range->written_to : range->read_to;
  if (first == nullptr || from < first) first = const_cast<char*>(from);
  if (to > last_byte) last_byte = const_cast<char*>(to);
}

void Warp::Begin(Block* its_block, unsigned its_number) {
  block = its_block;
  number = its_number;
  const Launch& launch = *block->launch;
  const unsigned size = launch.block.x * launch.block.y * launch.block.z;
  const unsigned first = number * kLanes;
  const unsigned count = std::min<unsigned>(kLanes, size - first);
  live = mask = count == kLanes ? ~0u : (1u << count) - 1;
  at = launch.kernel->entry;
  others = ~0u;
  groups.clear();
  for (const auto& [special, row] : launch.kernel->specials) {
    auto* const values = reinterpret_cast<uint32_t*>(rows[0] + row);
    for (unsigned lane = 0; lane < kLanes; ++lane) {
      const unsigned thread = first + lane;
      uint32_t value = 0;
      switch (special) {
        case Special::kTidX:
          value = thread % launch.block.x;
          break;
        case Special::kTidY:
          value = thread / launch.block.x % launch.block.y;
          break;
        case Special::kTidZ:
          value = thread / launch.block.x / launch.block.y;
          break;
        case Special::kNtidX:
          value = launch.block.x;
          break;
        case Special::kNtidY:
          value = launch.block.y;
          break;
        case Special::kNtidZ:
          value = launch.block.z;
          break;
        case Special::kCtaidX:
          value = block->index.x;
          break;
        case Special::kCtaidY:
          value = block->index.y;
          break;
        case Special::kCtaidZ:
          value = block->index.z;
          break;
        case Special::kNctaidX:
          value = launch.grid.x;
          break;
        case Special::kNctaidY:
          value = launch.grid.y;
          break;
        case Special::kNctaidZ:
          value = launch.grid.z;
          break;
        case Special::kLaneid:
          value = lane;
          break;
        case Special::kWarpid:
          value = number;
          break;
        case Special::kNwarpid:
          value = (size + kLanes - 1) / kLanes;
          break;
        case Special::kLanemaskEq:
          value = 1u << lane;
          break;
        case Special::kLanemaskLt:
          value = (1u << lane) - 1;
          break;
        case Special::kLanemaskLe:
          value = ((1u << lane) - 1) | (1u << lane);
          break;
        case Special::kLanemaskGe:
          value = ~((1u << lane) - 1);
          break;
        case Special::kLanemaskGt:
          value = ~(((1u << lane) - 1) | (1u << lane));
          break;
        case Special::kDynamicShared:
          value = launch.dynamic_shared;
          break;
        case Special::kClock:
        case Special::kZero:
          break;
      }
      values[lane] = value;
    }
  }
}

void Warp::Run() {
  const Instr* const code = block->launch->kernel->code.data();
  const Instr* in = code;
  try {
    for (;;) {
      if (at >= others && !Choose()) return;
      in = &code[at];
      active = mask;
      if (in->guard.at != kNowhere) active &= Mask(in->guard);
      next = at + 1;
      if (active != 0) in->run(*this, *in);
      at = next;
    }
  } catch (const KernelFault& fault) {
    throw KernelFault(std::string(fault.what()) + " (line " +
                      std::to_string(in->line) + " of its PTX)");
  }
}

void Warp::Jump(uint32_t target) {
  const uint32_t rest = mask & ~active;
  if (rest != 0) {
    groups.push_back(Group{rest, at + 1, 0, Group::kReady});
    others = std::min(others, at + 1);
    mask = active;
  }
  next = target;
}

void Warp::Stop(Group::State state, uint32_t where, uint32_t needed) {
  groups.push_back(Group{active, where, needed, state});
  mask &= ~active;
  others = 0;
}

void Warp::End() {
  live &= ~active;
  mask &= ~active;
  others = 0;
}

bool Warp::Gathered(uint32_t needed) {
  if ((needed & live & ~active) == 0) return true;
  Stop(Group::kAwaited, at, needed);
  return false;
}

void Warp::PassBarrier() {
  for (Group& group : groups) group.state = Group::kReady;
  others = 0;
}

bool Warp::Choose() {
  if (mask != 0) groups.push_back(Group{mask, at, 0, Group::kReady});
  mask = 0;
  // Lanes at one place are one group. Those that waited for others may go on with
  // them.
  size_t count = 0;
  for (const Group& group : groups) {
    size_t same = 0;
    while (same < count && (groups[same].at != group.at ||
                            (groups[same].state == Group::kAtBarrier) !=
                                (group.state == Group::kAtBarrier)))
      ++same;
    if (same == count) {
      groups[count++] = group;
    } else {
      groups[same].mask |= group.mask;
      groups[same].needed |= group.needed;
      if (group.state == Group::kReady) groups[same].state = Group::kReady;
    }
  }
  groups.resize(count);
  const Group* chosen = nullptr;
  bool awaited = false;
  for (Group& group : groups) {
    if (group.state == Group::kAwaited && (group.needed & live & ~group.mask) == 0)
      group.state = Group::kReady;
    awaited |= group.state == Group::kAwaited;
    if (group.state != Group::kReady) continue;
    if (chosen == nullptr || group.at < chosen->at) chosen = &group;
  }
  if (chosen == nullptr) {
    if (awaited) throw KernelFault("waits for threads of its warp that never come");
    return false;
  }
  at = chosen->at;
  mask = chosen->mask;
  groups.erase(groups.begin() + (chosen - groups.data()));
  others = ~0u;
  for (const Group& group : groups)
    if (group.state == Group::kReady) others = std::min(others, group.at);
  return true;
}

namespace {

/// Memory of a block's warps, kept for the next launch of this thread.
struct Room {
  std::vector<char> rows, local, constants;
  std::vector<Warp> warps;
  Block block;
};

void RunBlock(const Launch& launch, Room& room, unsigned warps, size_t row_bytes,
              size_t local_bytes) {
  const Kernel& kernel = *launch.kernel;
  const auto prepare = [&](Warp& warp, size_t place) {
    warp.rows[0] = room.rows.data() + place * row_bytes;
    warp.rows[1] = room.constants.data();
    warp.local = room.local.data() + place * local_bytes;
    warp.local_bytes = kernel.local_bytes;
    warp.memory = launch.memory;
  };
  if (!kernel.has_barrier) {  // each warp by itself, in the same memory
    for (unsigned i = 0; i < warps; ++i) {
      prepare(room.warps[0], 0);
      room.warps[0].Begin(&room.block, i);
      room.warps[0].Run();
    }
    return;
  }
  for (unsigned i = 0; i < warps; ++i) {
    prepare(room.warps[i], i);
    room.warps[i].Begin(&room.block, i);
  }
  for (bool all_ended = false; !all_ended;) {
    all_ended = true;
    for (Warp& warp : room.warps) {
      if (warp.ended()) continue;
      warp.Run();
      if (warp.ended()) continue;
      all_ended = false;
    }
    for (Warp& warp : room.warps)
      if (!warp.ended()) warp.PassBarrier();
  }
}

}  // namespace

void Run(const Launch& launch) {
  thread_local Room room;
  const Kernel& kernel = *launch.kernel;
  const unsigned threads = launch.block.x * launch.block.y * launch.block.z;
  const unsigned warps = (threads + kLanes - 1) / kLanes;
  const size_t row_bytes = (size_t{kernel.register_bytes} + 63) / 64 * 64;
  const size_t local_bytes = size_t{kernel.local_bytes} * kLanes;
  const unsigned places = kernel.has_barrier ? warps : 1;
  // Vectors may lie at any address that their values allow; rows begin at a line.
  room.rows.resize(places * row_bytes + 64);
  room.local.resize(places * local_bytes + 64);
  room.constants = kernel.constants;
  room.warps.resize(places);
  room.block.launch = &launch;
  room.block.shared.resize(kernel.shared_bytes + launch.dynamic_shared + 16);
  for (unsigned z = 0; z < launch.grid.z; ++z) {
    for (unsigned y = 0; y < launch.grid.y; ++y) {
      for (unsigned x = 0; x < launch.grid.x; ++x) {
        room.block.index = Dim{x, y, z};
        RunBlock(launch, room, warps, row_bytes, local_bytes);
      }
    }
  }
}

}  // namespace ptx
