// Instructions on memory: loads, stores, atomic operations, addresses.
//
// An address in global or generic memory is the host's own. In shared memory and
// that of a lane it is an offset, until it is made generic.
#include <algorithm>

#include "decode.h"

namespace ptx {

namespace {

/// Where each active lane's values are.
struct Addresses {
  char* at[kLanes];

  Addresses(Warp& warp, const Instr& in, const Operand& base, size_t bytes,
            Access access) {
    const auto offset = static_cast<uint64_t>(in.offset);
    if (base.at == kNowhere) {
      ForLanes(warp.active,
               [&](int lane) { at[lane] = reinterpret_cast<char*>(offset); });
    } else if (base.bits == 32) {
      const uint32_t* const from = warp.Row<const uint32_t>(base);
      ForLanes(warp.active, [&](int lane) {
        at[lane] = reinterpret_cast<char*>(
            static_cast<uint64_t>(static_cast<uint32_t>(from[lane] + offset)));
      });
    } else {
      const uint64_t* const from = warp.Row<const uint64_t>(base);
      ForLanes(warp.active, [&](int lane) {
        at[lane] = reinterpret_cast<char*>(from[lane] + offset);
      });
    }
    uintptr_t odd = 0;
    ForLanes(warp.active,
             [&](int lane) { odd |= reinterpret_cast<uintptr_t>(at[lane]); });
    if ((odd & (bytes - 1)) != 0)
      throw KernelFault("uses an address that is not a multiple of " +
                        std::to_string(bytes));
    if (in.space == Space::kShared)
      Within(warp, warp.block->shared.data(), SharedBytes(warp), 0, bytes);
    else if (in.space == Space::kLocal)
      Within(warp, warp.local, warp.local_bytes, warp.local_bytes, bytes);
    else if (in.space == Space::kParam)
      Within(warp, Params(warp), warp.block->launch->params.size(), 0, bytes);
    else if (in.space == Space::kGlobal)
      CheckGlobal(warp, bytes, access);
    else
      CheckGeneric(warp, bytes, access);
  }

 private:
  static char* Params(Warp& warp) {
    return const_cast<char*>(warp.block->launch->params.data());
  }
  static size_t SharedBytes(Warp& warp) {
    return warp.block->launch->kernel->shared_bytes +
           warp.block->launch->dynamic_shared;
  }
  /// Makes offsets in a piece of memory, of which each lane has its own, addresses.
  void Within(Warp& warp, char* memory, size_t size, size_t step, size_t bytes) {
    bool is_out = false;
    ForLanes(warp.active, [&](int lane) {
      const auto offset = reinterpret_cast<uintptr_t>(at[lane]);
      is_out |= offset + bytes > size || offset + bytes < bytes;
      at[lane] = memory + step * lane + offset;
    });
    if (is_out) throw KernelFault("uses shared or local memory past its end");
  }
  void CheckGlobal(Warp& warp, size_t bytes, Access access) {
    char* first = reinterpret_cast<char*>(~uintptr_t{0});
    char* last = nullptr;
    ForLanes(warp.active, [&](int lane) {
      first = std::min(first, at[lane]);
      last = std::max(last, at[lane]);
    });
    const Range* const range = warp.memory->RangeOf(first);
    if (range != nullptr &&
        last + bytes <=
            (access == Access::kWrite ? range->end : range->end_of_word))
      return warp.memory->Check(first, last + bytes, access);
    ForLanes(warp.active, [&](int lane) {
      warp.memory->Check(at[lane], at[lane] + bytes, access);
    });
  }
  void CheckGeneric(Warp& warp, size_t bytes, Access access) {
    char* const shared = warp.block->shared.data();
    ForLanes(warp.active, [&](int lane) {
      char* const local = warp.local + size_t{warp.local_bytes} * lane;
      const auto is_in = [&](char* memory, size_t size) {
        return at[lane] >= memory && at[lane] + bytes <= memory + size;
      };
      if (is_in(shared, SharedBytes(warp)) || is_in(local, warp.local_bytes))
        return;
      if (access == Access::kRead &&
          is_in(Params(warp), warp.block->launch->params.size()))
        return;
      warp.memory->Check(at[lane], at[lane] + bytes, access);
    });
  }
};

template <typename T>
void Load(Warp& warp, const Instr& in) {
  const Addresses from(warp, in, in.ops[in.count], in.count * sizeof(T),
                       Access::kRead);
  for (int i = 0; i < in.count; ++i) {
    const Operand& to = in.ops[i];
    if (to.at == kNowhere) continue;
    if (to.bits == 8 * sizeof(T)) {
      T* const row = warp.Row<T>(to);
      ForLanes(warp.active, [&](int lane) {
        std::memcpy(&row[lane], from.at[lane] + i * sizeof(T), sizeof(T));
      });
      continue;
    }
    ForLanes(warp.active, [&](int lane) {
      T value;
      std::memcpy(&value, from.at[lane] + i * sizeof(T), sizeof(T));
      warp.Set(to, lane, static_cast<uint64_t>(static_cast<int64_t>(value)));
    });
  }
}
template <typename T>
void Store(Warp& warp, const Instr& in) {
  const Addresses to(warp, in, in.ops[0], in.count * sizeof(T), Access::kWrite);
  for (int i = 0; i < in.count; ++i) {
    const Operand& from = in.ops[1 + i];
    if (from.bits == 8 * sizeof(T)) {
      const T* const row = warp.Row<const T>(from);
      ForLanes(warp.active, [&](int lane) {
        std::memcpy(to.at[lane] + i * sizeof(T), &row[lane], sizeof(T));
      });
      continue;
    }
    ForLanes(warp.active, [&](int lane) {
      const T value = static_cast<T>(warp.Value(from, lane));
      std::memcpy(to.at[lane] + i * sizeof(T), &value, sizeof(T));
    });
  }
}

/// Lanes one after the other: each reads what the one before wrote.
template <typename F, typename T, bool kReturns>
void Atomic(Warp& warp, const Instr& in) {
  const Operand* const ops = in.ops + kReturns;
  const Addresses to(warp, in, ops[0], sizeof(T), Access::kAtomic);
  for (uint32_t left = warp.active; left != 0; left &= left - 1) {
    const int lane = __builtin_ctz(left);
    T before;
    std::memcpy(&before, to.at[lane], sizeof(T));
    T after;
    if constexpr (std::is_invocable_v<F, T, T, T>)
      after = F{}(before, warp.Row<const T>(ops[1])[lane],
                  warp.Row<const T>(ops[2])[lane]);
    else
      after = F{}(before, warp.Row<const T>(ops[1])[lane]);
    std::memcpy(to.at[lane], &after, sizeof(T));
    if (kReturns && in.ops[0].at != kNowhere) warp.Row<T>(in.ops[0])[lane] = before;
  }
}
/// The same for vectors in braces, which only additions have.
template <typename T>
void AddVector(Warp& warp, const Instr& in) {
  const Addresses to(warp, in, in.ops[0], sizeof(T) * in.count, Access::kAtomic);
  for (uint32_t left = warp.active; left != 0; left &= left - 1) {
    const int lane = __builtin_ctz(left);
    for (int i = 0; i < in.count; ++i) {
      T value;
      std::memcpy(&value, to.at[lane] + i * sizeof(T), sizeof(T));
      value = T(value + warp.Row<const T>(in.ops[1 + i])[lane]);
      std::memcpy(to.at[lane] + i * sizeof(T), &value, sizeof(T));
    }
  }
}

template <typename F, typename... T>
Handler AtomicOf(std::string_view type,
                 std::initializer_list<std::string_view> names, bool returns) {
  Handler found = nullptr;
  size_t i = 0;
  const auto look = [&](auto zero) {
    using One = decltype(zero);
    if (*(names.begin() + i++) != type) return;
    found = returns ? &Atomic<F, One, true> : &Atomic<F, One, false>;
  };
  (look(T{}), ...);
  return found;
}

Handler DecodeAtomic(Parts& parts, Instr& in, bool returns) {
  parts.Take("noftz");
  const std::string_view type = parts.last();
  if (in.count > 1) {  // a vector
    parts.TakeAll("v");
    if (returns || !parts.Take("add")) return nullptr;
    return type == "f32"    ? &AddVector<float>
           : type == "f16"  ? &AddVector<Half>
           : type == "bf16" ? &AddVector<Bfloat>
                            : nullptr;
  }
  if (parts.Take("add")) {
    using Add = decltype([](auto a, auto b) { return decltype(a)(a + b); });
    using AddPair = decltype([](auto a, auto b) {
      using P = decltype(a);
      using T = decltype(a.low);
      return P{T(a.low + b.low), T(a.high + b.high)};
    });
    if (type == "f16x2" || type == "bf16x2")
      return AtomicOf<AddPair, Pair<Half>, Pair<Bfloat>>(type, {"f16x2", "bf16x2"},
                                                         returns);
    return AtomicOf<Add, uint32_t, uint32_t, uint64_t, float, double, Half, Bfloat>(
        type, {"u32", "s32", "u64", "f32", "f64", "f16", "bf16"}, returns);
  }
  if (parts.Take("min"))
    return AtomicOf<decltype([](auto a, auto b) { return std::min(a, b); }),
                    uint32_t, int32_t, uint64_t, int64_t>(
        type, {"u32", "s32", "u64", "s64"}, returns);
  if (parts.Take("max"))
    return AtomicOf<decltype([](auto a, auto b) { return std::max(a, b); }),
                    uint32_t, int32_t, uint64_t, int64_t>(
        type, {"u32", "s32", "u64", "s64"}, returns);
  if (parts.Take("and"))
    return AtomicOf<decltype([](auto a, auto b) { return a & b; }), uint32_t,
                    uint64_t>(type, {"b32", "b64"}, returns);
  if (parts.Take("or"))
    return AtomicOf<decltype([](auto a, auto b) { return a | b; }), uint32_t,
                    uint64_t>(type, {"b32", "b64"}, returns);
  if (parts.Take("xor"))
    return AtomicOf<decltype([](auto a, auto b) { return a ^ b; }), uint32_t,
                    uint64_t>(type, {"b32", "b64"}, returns);
  if (parts.Take("exch"))
    return AtomicOf<decltype([](auto, auto b) { return b; }), uint32_t, uint64_t>(
        type, {"b32", "b64"}, returns);
  if (parts.Take("cas"))
    return AtomicOf<decltype([](auto a, auto expected, auto wanted) {
                      return a == expected ? wanted : a;
                    }),
                    uint16_t, uint32_t, uint64_t>(type, {"b16", "b32", "b64"},
                                                  returns);
  if (parts.Take("inc"))
    return AtomicOf<decltype([](auto a, auto b) {
                      return a >= b ? decltype(a)(0) : a + 1;
                    }),
                    uint32_t>(type, {"u32"}, returns);
  if (parts.Take("dec"))
    return AtomicOf<decltype([](auto a, auto b) {
                      return a == 0 || a > b ? b : a - 1;
                    }),
                    uint32_t>(type, {"u32"}, returns);
  return nullptr;
}

/// Between offsets in a piece of memory and generic addresses. in.how: 1 to generic
/// ones.
void ConvertAddress(Warp& warp, const Instr& in) {
  ForLanes(warp.active, [&](int lane) {
    uintptr_t base = 0;
    if (in.space == Space::kShared)
      base = reinterpret_cast<uintptr_t>(warp.block->shared.data());
    if (in.space == Space::kLocal)
      base =
          reinterpret_cast<uintptr_t>(warp.local + size_t{warp.local_bytes} * lane);
    if (in.space == Space::kParam)
      base = reinterpret_cast<uintptr_t>(warp.block->launch->params.data());
    const uint64_t from = warp.Value(in.ops[1], lane);
    warp.Set(in.ops[0], lane, in.how != 0 ? from + base : from - base);
  });
}
void IsShared(Warp& warp, const Instr& in) {
  uint32_t is = 0;
  const auto begin = reinterpret_cast<uintptr_t>(warp.block->shared.data());
  ForLanes(warp.active, [&](int lane) {
    const uint64_t at = warp.Value(in.ops[1], lane);
    is |= uint32_t{at >= begin && at < begin + warp.block->shared.size()} << lane;
  });
  warp.SetMask(in.ops[0], is);
}

/// cp.async, which is a copy at once. ops: to (shared), from, bytes, bytes that
/// there are.
void CopyToShared(Warp& warp, const Instr& in) {
  const auto bytes = static_cast<size_t>(in.how);
  Instr of_to = in, of_from = in;
  of_to.space = Space::kShared;
  of_from.space = Space::kGlobal;
  of_from.offset = static_cast<int64_t>(in.target);
  const uint32_t all = warp.active;
  const Addresses to(warp, of_to, in.ops[0], bytes, Access::kWrite);
  ForLanes(all, [&](int lane) {
    size_t there = bytes;
    if (in.ops[2].at != kNowhere)
      there = std::min<size_t>(bytes, warp.Value(in.ops[2], lane));
    std::memset(to.at[lane], 0, bytes);
    if (there == 0) return;
    warp.active = 1u << lane;
    const Addresses from(warp, of_from, in.ops[1], there == bytes ? bytes : 1,
                         Access::kRead);
    std::memcpy(to.at[lane], from.at[lane], there);
  });
  warp.active = all;
}

template <bool kStores>
Handler AccessOf(const Type& type, Instr& in) {
  const bool is_signed = type.kind == 's';
  switch (type.bits) {
    case 8:
      if (kStores) return &Store<uint8_t>;
      return is_signed ? &Load<int8_t> : &Load<uint8_t>;
    case 16:
      if (kStores) return &Store<uint16_t>;
      return is_signed ? &Load<int16_t> : &Load<uint16_t>;
    case 32:
      if (kStores) return &Store<uint32_t>;
      return is_signed ? &Load<int32_t> : &Load<uint32_t>;
    case 64:
      if (kStores) return &Store<uint64_t>;
      return &Load<uint64_t>;
    default:
      (void)in;
      return nullptr;
  }
}

void TakeSpace(Parts& parts, Instr& in) {
  for (const auto& [name, space] :
       {std::pair{"global", Space::kGlobal}, std::pair{"const", Space::kGlobal},
        std::pair{"shared", Space::kShared},
        std::pair{"shared::cta", Space::kShared},
        std::pair{"local", Space::kLocal}})
    if (parts.Take(name)) in.space = space;
  // The parser knows whether it is a kernel's parameter or a function's.
  parts.Take("param") || parts.Take("param::entry") || parts.Take("param::func");
}
/// How fresh a value has to be, and where it is kept: all is so here.
void TakeOrder(Parts& parts) {
  for (const char* const word :
       {"volatile", "relaxed", "acquire", "release", "acq_rel", "weak", "sys",
        "gpu",      "cta",     "cluster", "nc",      "ca",      "cg",   "cs",
        "lu",       "cv",      "wb",      "wt",      "unified", "mmio", "sc"})
    parts.Take(word);
  parts.TakeAll("L1::");
  parts.TakeAll("L2::");
}

}  // namespace

Handler DecodeMemory(Parts& parts, std::string_view op, Instr& in) {
  if (op == "ld" || op == "ldu" || op == "st") {
    TakeSpace(parts, in);
    TakeOrder(parts);
    for (const char* const vector : {"v2", "v4", "v8"}) parts.Take(vector);
    const Type type = parts.type();
    return parts.End(
        op == "st" ? AccessOf<true>(type, in) : AccessOf<false>(type, in), true);
  }
  if (op == "atom" || op == "red") {
    TakeSpace(parts, in);
    TakeOrder(parts);
    return parts.End(DecodeAtomic(parts, in, op == "atom"), true);
  }
  if (op == "cvta") {
    in.how = parts.Take("to") ? 0 : 1;
    in.space = Space::kGlobal;
    TakeSpace(parts, in);
    if (parts.Has("param") || parts.Has("param::entry")) in.space = Space::kParam;
    return parts.End(&ConvertAddress, true);
  }
  if (op == "isspacep")
    return parts.Take("shared") || parts.Take("shared::cta") ? parts.End(&IsShared)
                                                             : nullptr;
  if (op == "cp" && parts.Take("async")) {
    if (parts.Take("commit_group") || parts.Take("wait_group") ||
        parts.Take("wait_all"))
      return parts.End([](Warp&, const Instr&) {});
    TakeOrder(parts);
    if (!(parts.Take("shared") || parts.Take("shared::cta")) ||
        !parts.Take("global"))
      return nullptr;
    return parts.End(&CopyToShared);
  }
  return nullptr;
}

}  // namespace ptx
