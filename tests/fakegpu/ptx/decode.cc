// The instructions: each opcode with its types becomes a function that does it for
// a warp.
//
// An opcode is decoded as a whole: one of its parts that is not understood makes it
// unknown. A wrong value would be worse than none.
#include "decode.h"

#include <algorithm>
#include <cfenv>

namespace ptx {

namespace {

// --- Loops over lanes
// --------------------------------------------------------------

template <typename F, typename To, typename... From>
void Map(Warp& warp, const Instr& in) {
  const auto run = [&]<size_t... I>(std::index_sequence<I...>) {
    To* const to = warp.Row<To>(in.ops[0]);
    const std::tuple<const From*...> from{warp.Row<const From>(in.ops[I + 1])...};
    ForLanes(warp.active,
             [&](int lane) { to[lane] = F{}(std::get<I>(from)[lane]...); });
  };
  run(std::index_sequence_for<From...>{});
}

/// Sets a predicate (and its opposite), joined with another one.
enum Join { kAlone, kAnd, kOr, kXor };

template <typename F, typename T>
void Compare(Warp& warp, const Instr& in) {
  const T* const a = warp.Row<const T>(in.ops[2]);
  const T* const b = warp.Row<const T>(in.ops[3]);
  uint32_t is = 0;
  ForLanes(warp.active,
           [&](int lane) { is |= uint32_t{F{}(a[lane], b[lane])} << lane; });
  uint32_t is_not = ~is;
  if (in.how != kAlone) {
    const uint32_t with = warp.Mask(in.ops[4]);
    is = in.how == kAnd ? is & with : in.how == kOr ? is | with : is ^ with;
    is_not = in.how == kAnd  ? is_not & with
             : in.how == kOr ? is_not | with
                             : is_not ^ with;
  }
  if (in.ops[0].at != kNowhere) warp.SetMask(in.ops[0], is);
  if (in.ops[1].at != kNowhere) warp.SetMask(in.ops[1], is_not);
}

/// F takes and returns masks of lanes.
template <typename F, int kCount>
void OnMasks(Warp& warp, const Instr& in) {
  if constexpr (kCount == 1)
    warp.SetMask(in.ops[0], F{}(warp.Mask(in.ops[1])));
  else
    warp.SetMask(in.ops[0], F{}(warp.Mask(in.ops[1]), warp.Mask(in.ops[2])));
}

template <typename T>
void Select(Warp& warp, const Instr& in) {
  T* const to = warp.Row<T>(in.ops[0]);
  const T* const yes = warp.Row<const T>(in.ops[1]);
  const T* const no = warp.Row<const T>(in.ops[2]);
  const uint32_t mask = warp.Mask(in.ops[3]);
  ForLanes(warp.active, [&](int lane) {
    to[lane] = ((mask >> lane) & 1) != 0 ? yes[lane] : no[lane];
  });
}

template <typename F, typename T, int kCount>
constexpr Handler Same() {
  if constexpr (kCount == 1) return &Map<F, T, T>;
  if constexpr (kCount == 2) return &Map<F, T, T, T>;
  if constexpr (kCount == 3) return &Map<F, T, T, T, T>;
}

// --- Changes of a function
// ---------------------------------------------------------

template <typename F>
struct Flushing {
  template <typename... T>
  auto operator()(T... values) const {
    return Flushed(F{}(Flushed(values)...));
  }
};
template <typename F>
struct Saturating {
  template <typename... T>
  auto operator()(T... values) const {
    const auto value = F{}(values...);
    using Result = std::decay_t<decltype(value)>;
    return Result(value >= Result(1.f)  ? 1.f
                  : value > Result(0.f) ? float(value)
                                        : 0.f);
  }
};
template <typename F>
struct OnPair {
  template <typename T, typename... Others>
  auto operator()(Pair<T> value, Others... others) const {
    return Pair<T>{F{}(value.low, others.low...), F{}(value.high, others.high...)};
  }
};

/// Runs an instruction in another rounding mode. Processors have one for a thread.
void Rounded(Warp& warp, const Instr& in) {
  std::fesetround(in.how);
  in.inner(warp, in);
  std::fesetround(FE_TONEAREST);
}

int ModeOf(char mode) {
  return mode == 'z'   ? FE_TOWARDZERO
         : mode == 'm' ? FE_DOWNWARD
         : mode == 'p' ? FE_UPWARD
                       : FE_TONEAREST;
}

/// Takes a rounding mode of arithmetic: rn, rz, rm, rp.
void TakeMode(Parts& parts, Instr& in, bool& rounds) {
  for (const char mode : {'n', 'z', 'm', 'p'}) {
    if (!parts.Take(std::string("r") + mode)) continue;
    if (mode != 'n') rounds = true, in.how = ModeOf(mode);
  }
}

template <int kCount, typename F>
Handler Floats(F, Parts& parts, Instr& in) {
  bool rounds = false;
  TakeMode(parts, in, rounds);
  const bool flushes = parts.Take("ftz");
  const bool saturates = parts.Take("sat");
  const std::string_view type = parts.last();
  Handler found = nullptr;
  if (type == "f32") {
    found = flushes && saturates ? Same<Saturating<Flushing<F>>, float, kCount>()
            : flushes            ? Same<Flushing<F>, float, kCount>()
            : saturates          ? Same<Saturating<F>, float, kCount>()
                                 : Same<F, float, kCount>();
  } else if (type == "f64" && !saturates) {
    found = Same<F, double, kCount>();
  } else if (rounds || flushes || saturates) {
    return nullptr;
  } else if (type == "f16") {
    found = Same<F, Half, kCount>();
  } else if (type == "bf16") {
    found = Same<F, Bfloat, kCount>();
  } else if (type == "f16x2") {
    found = Same<OnPair<F>, Pair<Half>, kCount>();
  } else if (type == "bf16x2") {
    found = Same<OnPair<F>, Pair<Bfloat>, kCount>();
  }
  if (found == nullptr || !rounds) return found;
  in.inner = found;
  return &Rounded;
}

/// F is given unsigned numbers, or signed ones if the type is.
template <int kCount, typename F>
Handler Integers(F, Parts& parts) {
  const Type type = parts.type();
  if (type.kind == 's') {
    if (type.bits == 16) return Same<F, int16_t, kCount>();
    if (type.bits == 32) return Same<F, int32_t, kCount>();
    if (type.bits == 64) return Same<F, int64_t, kCount>();
  } else if (type.kind == 'u' || type.kind == 'b') {
    if (type.bits == 16) return Same<F, uint16_t, kCount>();
    if (type.bits == 32) return Same<F, uint32_t, kCount>();
    if (type.bits == 64) return Same<F, uint64_t, kCount>();
  }
  return nullptr;
}
/// The same with unsigned numbers only, whose overflow C++ defines.
template <int kCount, typename F>
Handler Wrapping(F, Parts& parts) {
  const Type type = parts.type();
  if (type.kind == 'f') return nullptr;
  if (type.bits == 16) return Same<F, uint16_t, kCount>();
  if (type.bits == 32) return Same<F, uint32_t, kCount>();
  if (type.bits == 64) return Same<F, uint64_t, kCount>();
  return nullptr;
}

bool IsFloat(const Parts& parts) {
  const std::string_view type = parts.last();
  return type[0] == 'f' || type.substr(0, 2) == "bf";
}

// --- Arithmetic
// --------------------------------------------------------------------

/// Additions with a carry, which each lane has.
template <typename T, bool kAdds, bool kTakes, bool kGives>
void Carry(Warp& warp, const Instr& in) {
  using Wide = unsigned __int128;
  T* const to = warp.Row<T>(in.ops[0]);
  const T* const a = warp.Row<const T>(in.ops[1]);
  const T* const b = warp.Row<const T>(in.ops[2]);
  ForLanes(warp.active, [&](int lane) {
    const Wide one = kTakes ? (warp.carry >> lane) & 1 : 0;
    const Wide all =
        kAdds ? Wide{a[lane]} + b[lane] + one : Wide{a[lane]} - b[lane] - one;
    to[lane] = static_cast<T>(all);
    if (!kGives) return;
    const uint32_t bit = static_cast<uint32_t>(all >> (8 * sizeof(T))) & 1;
    warp.carry = (warp.carry & ~(1u << lane)) | bit << lane;
  });
}
template <typename T, bool kHigh, bool kTakes, bool kGives>
void CarryMad(Warp& warp, const Instr& in) {
  using Wide = unsigned __int128;
  T* const to = warp.Row<T>(in.ops[0]);
  const T* const a = warp.Row<const T>(in.ops[1]);
  const T* const b = warp.Row<const T>(in.ops[2]);
  const T* const c = warp.Row<const T>(in.ops[3]);
  ForLanes(warp.active, [&](int lane) {
    const Wide product = Wide{a[lane]} * b[lane];
    const T part = static_cast<T>(kHigh ? product >> (8 * sizeof(T)) : product);
    const Wide all = Wide{part} + c[lane] + (kTakes ? (warp.carry >> lane) & 1 : 0);
    to[lane] = static_cast<T>(all);
    if (!kGives) return;
    const uint32_t bit = static_cast<uint32_t>(all >> (8 * sizeof(T))) & 1;
    warp.carry = (warp.carry & ~(1u << lane)) | bit << lane;
  });
}

Handler CarryHandler(Parts& parts, bool adds, bool takes) {
  const bool gives = parts.Take("cc");
  const Type type = parts.type();
  const auto choose = [&](auto zero) -> Handler {
    using T = decltype(zero);
    if (adds && takes)
      return gives ? &Carry<T, true, true, true> : &Carry<T, true, true, false>;
    if (adds) return gives ? &Carry<T, true, false, true> : nullptr;
    if (takes)
      return gives ? &Carry<T, false, true, true> : &Carry<T, false, true, false>;
    return gives ? &Carry<T, false, false, true> : nullptr;
  };
  return type.bits == 32   ? choose(uint32_t{})
         : type.bits == 64 ? choose(uint64_t{})
                           : nullptr;
}
Handler CarryMadHandler(Parts& parts, bool high, bool takes, bool gives) {
  const Type type = parts.type();
  if (high && type.kind == 's') return nullptr;
  const auto choose = [&](auto zero) -> Handler {
    using T = decltype(zero);
    if (high && takes)
      return gives ? &CarryMad<T, true, true, true>
                   : &CarryMad<T, true, true, false>;
    if (high) return gives ? &CarryMad<T, true, false, true> : nullptr;
    if (takes)
      return gives ? &CarryMad<T, false, true, true>
                   : &CarryMad<T, false, true, false>;
    return gives ? &CarryMad<T, false, false, true> : nullptr;
  };
  return type.bits == 32   ? choose(uint32_t{})
         : type.bits == 64 ? choose(uint64_t{})
                           : nullptr;
}

template <typename T>
struct WiderOf;
template <>
struct WiderOf<uint16_t> {
  using type = uint32_t;
};
template <>
struct WiderOf<int16_t> {
  using type = int32_t;
};
template <>
struct WiderOf<uint32_t> {
  using type = uint64_t;
};
template <>
struct WiderOf<int32_t> {
  using type = int64_t;
};
template <>
struct WiderOf<uint64_t> {
  using type = unsigned __int128;
};
template <>
struct WiderOf<int64_t> {
  using type = __int128;
};
template <typename T>
using Wider = typename WiderOf<T>::type;

const auto kHighProduct = [](auto a, auto b) {
  using T = decltype(a);
  return static_cast<T>((Wider<T>{a} * Wider<T>{b}) >> (8 * sizeof(T)));
};
const auto kHighMad = [](auto a, auto b, auto c) {
  using T = decltype(a);
  using U = std::make_unsigned_t<T>;
  return static_cast<T>(
      static_cast<U>((Wider<T>{a} * Wider<T>{b}) >> (8 * sizeof(T))) +
      static_cast<U>(c));
};
const auto kWideProduct = [](auto a, auto b) {
  using W = Wider<decltype(a)>;
  using U = std::make_unsigned_t<W>;
  return static_cast<W>(static_cast<U>(W{a}) * static_cast<U>(W{b}));
};
const auto kWideMad = [](auto a, auto b, auto c) {
  using W = decltype(c);
  using U = std::make_unsigned_t<W>;
  return static_cast<W>(static_cast<U>(W{a}) * static_cast<U>(W{b}) +
                        static_cast<U>(c));
};

template <int kCount, typename F>
Handler Widening(F, Parts& parts) {
  const Type type = parts.type();
  const auto choose = [&](auto zero) -> Handler {
    using T = decltype(zero);
    if constexpr (kCount == 2) return &Map<F, Wider<T>, T, T>;
    if constexpr (kCount == 3) return &Map<F, Wider<T>, T, T, Wider<T>>;
  };
  if (type.kind == 's')
    return type.bits == 16   ? choose(int16_t{})
           : type.bits == 32 ? choose(int32_t{})
                             : nullptr;
  return type.bits == 16   ? choose(uint16_t{})
         : type.bits == 32 ? choose(uint32_t{})
                           : nullptr;
}

const auto kAdd = [](auto a, auto b) { return decltype(a)(a + b); };
const auto kSub = [](auto a, auto b) { return decltype(a)(a - b); };
const auto kMul = [](auto a, auto b) { return decltype(a)(a * b); };
const auto kMad = [](auto a, auto b, auto c) { return decltype(a)(a * b + c); };

template <typename F>
Handler SaturatingIntegers(F, Parts& parts) {  // only .s32 has it
  return parts.last() == "s32" ? Same<F, int32_t, 2>() : nullptr;
}
int32_t Clamped(int64_t value) {
  return static_cast<int32_t>(std::clamp<int64_t>(value, INT32_MIN, INT32_MAX));
}

Handler DecodeAdd(Parts& parts, Instr& in) {
  if (IsFloat(parts)) return Floats<2>(kAdd, parts, in);
  if (parts.Has("cc")) return CarryHandler(parts, true, false);
  if (parts.Take("sat"))
    return SaturatingIntegers(
        [](int32_t a, int32_t b) { return Clamped(int64_t{a} + b); }, parts);
  return Wrapping<2>(kAdd, parts);
}
Handler DecodeSub(Parts& parts, Instr& in) {
  if (IsFloat(parts)) return Floats<2>(kSub, parts, in);
  if (parts.Has("cc")) return CarryHandler(parts, false, false);
  if (parts.Take("sat"))
    return SaturatingIntegers(
        [](int32_t a, int32_t b) { return Clamped(int64_t{a} - b); }, parts);
  return Wrapping<2>(kSub, parts);
}
Handler DecodeMul(Parts& parts, Instr& in) {
  if (IsFloat(parts)) return Floats<2>(kMul, parts, in);
  if (parts.Take("lo")) {
    // Of 16 bits, C++ multiplies signed numbers.
    if (parts.type().bits == 16)
      return Same<decltype([](uint16_t a, uint16_t b) {
                    return uint16_t(uint32_t{a} * b);
                  }),
                  uint16_t, 2>();
    return Wrapping<2>(kMul, parts);
  }
  if (parts.Take("hi")) return Integers<2>(kHighProduct, parts);
  if (parts.Take("wide")) return Widening<2>(kWideProduct, parts);
  return nullptr;
}
Handler DecodeMad(Parts& parts, Instr& in) {
  if (IsFloat(parts))
    return Floats<3>([](auto a, auto b, auto c) { return Fma(a, b, c); }, parts,
                     in);
  const bool gives = parts.Take("cc");
  if (parts.Take("lo")) {
    if (gives) return CarryMadHandler(parts, false, false, true);
    if (parts.type().bits == 16)
      return Same<decltype([](uint16_t a, uint16_t b, uint16_t c) {
                    return uint16_t(uint32_t{a} * b + c);
                  }),
                  uint16_t, 3>();
    return Wrapping<3>(kMad, parts);
  }
  if (parts.Take("hi"))
    return gives ? CarryMadHandler(parts, true, false, true)
                 : Integers<3>(kHighMad, parts);
  if (parts.Take("wide")) return Widening<3>(kWideMad, parts);
  return nullptr;
}
Handler DecodeMadc(Parts& parts, Instr&) {
  const bool gives = parts.Take("cc");
  const bool high = parts.Take("hi");
  if (!high && !parts.Take("lo")) return nullptr;
  return CarryMadHandler(parts, high, true, gives);
}
Handler DecodeDiv(Parts& parts, Instr& in) {
  if (IsFloat(parts)) {
    parts.Take("full") || parts.Take("approx");
    return Floats<2>([](auto a, auto b) { return decltype(a)(a / b); }, parts, in);
  }
  // A division by zero has a result of all ones; the smallest number by -1 is
  // itself.
  return Integers<2>(
      [](auto a, auto b) {
        using T = decltype(a);
        if (b == 0) return T(~T{0});
        if (std::is_signed_v<T> && b == T(-1))
          return T(0 - std::make_unsigned_t<T>(a));
        return T(a / b);
      },
      parts);
}
Handler DecodeRem(Parts& parts, Instr&) {
  return Integers<2>(
      [](auto a, auto b) {
        using T = decltype(a);
        if (b == 0) return a;
        if (std::is_signed_v<T> && b == T(-1)) return T(0);
        return T(a % b);
      },
      parts);
}

Handler DecodeAbs(Parts& parts, Instr& in) {
  if (IsFloat(parts))
    return Floats<1>(
        [](auto a) {
          using T = decltype(a);
          if constexpr (std::is_floating_point_v<T>)
            return std::fabs(a);
          else {
            a.bits &= 0x7fff;
            return a;
          }
        },
        parts, in);
  return Integers<1>(
      [](auto a) {
        using T = decltype(a);
        return a < 0 ? T(0 - std::make_unsigned_t<T>(a)) : a;
      },
      parts);
}
Handler DecodeNeg(Parts& parts, Instr& in) {
  if (IsFloat(parts))
    return Floats<1>(
        [](auto a) {
          using T = decltype(a);
          if constexpr (std::is_floating_point_v<T>)
            return -a;
          else {
            a.bits ^= 0x8000;
            return a;
          }
        },
        parts, in);
  return Wrapping<1>([](auto a) { return decltype(a)(0 - a); }, parts);
}
Handler DecodeMin(Parts& parts, Instr& in) {
  if (!IsFloat(parts)) {
    if (parts.Take("relu"))
      return Integers<2>(
          [](auto a, auto b) { return std::max(std::min(a, b), decltype(a)(0)); },
          parts);
    return Integers<2>([](auto a, auto b) { return std::min(a, b); }, parts);
  }
  if (parts.Take("NaN"))
    return Floats<2>([](auto a, auto b) { return Min<true>(a, b); }, parts, in);
  return Floats<2>([](auto a, auto b) { return Min<false>(a, b); }, parts, in);
}
Handler DecodeMax(Parts& parts, Instr& in) {
  if (!IsFloat(parts)) {
    if (parts.Take("relu"))
      return Integers<2>(
          [](auto a, auto b) { return std::max(std::max(a, b), decltype(a)(0)); },
          parts);
    return Integers<2>([](auto a, auto b) { return std::max(a, b); }, parts);
  }
  if (parts.Take("NaN"))
    return Floats<2>([](auto a, auto b) { return Max<true>(a, b); }, parts, in);
  return Floats<2>([](auto a, auto b) { return Max<false>(a, b); }, parts, in);
}
Handler DecodeCopysign(Parts& parts, Instr& in) {  // the first operand has the sign
  if (parts.last() != "f32" && parts.last() != "f64") return nullptr;
  return Floats<2>(
      [](auto sign, auto size) {
        if constexpr (std::is_floating_point_v<decltype(sign)>)
          return std::copysign(size, sign);
        else
          return sign;
      },
      parts, in);
}

/// Functions that the device approximates, by the exact ones. Of numbers of 16
/// bits, too.
template <typename F>
Handler Function(F f, Parts& parts, Instr& in) {
  parts.Take("approx");
  return Floats<1>(f, parts, in);
}
template <typename T>
auto Precise(T value) {  // rounded once
  if constexpr (std::is_same_v<T, double>)
    return value;
  else
    return static_cast<double>(static_cast<float>(value));
}
#define PTX_FUNCTION(expression)                     \
  Function(                                          \
      [](auto a) {                                   \
        const double x = Precise(a);                 \
        return static_cast<decltype(a)>(expression); \
      },                                             \
      parts, in)

/// Of f64, rcp and rsqrt give the upper half of a number; the rest is for the
/// program to find.
template <typename F>
void UpperHalf(Warp& warp, const Instr& in) {
  double* const to = warp.Row<double>(in.ops[0]);
  const double* const from = warp.Row<const double>(in.ops[1]);
  ForLanes(warp.active, [&](int lane) {
    const auto bits = Bits<uint64_t>(from[lane]) & ~uint64_t{0xffffffff};
    to[lane] = Bits<double>(Bits<uint64_t>(F{}(Bits<double>(bits))) &
                            ~uint64_t{0xffffffff});
  });
}

// --- Bits
// --------------------------------------------------------------------------

template <typename F>
Handler Logic(F, Parts& parts) {
  if (parts.last() == "pred") return &OnMasks<F, 2>;
  return Wrapping<2>(F{}, parts);
}

template <typename T, typename F>
Handler ShiftOf() {
  return &Map<F, T, T, uint32_t>;
}
Handler DecodeShl(Parts& parts, Instr&) {
  const auto shift = [](auto a, uint32_t by) {
    using T = decltype(a);
    return by >= 8 * sizeof(T) ? T(0) : T(a << by);
  };
  using F = decltype(shift);
  const int bits = parts.type().bits;
  return bits == 16   ? ShiftOf<uint16_t, F>()
         : bits == 32 ? ShiftOf<uint32_t, F>()
         : bits == 64 ? ShiftOf<uint64_t, F>()
                      : nullptr;
}
Handler DecodeShr(Parts& parts, Instr&) {
  const auto shift = [](auto a, uint32_t by) {
    using T = decltype(a);
    constexpr uint32_t kBits = 8 * sizeof(T);
    if (std::is_signed_v<T>) return T(a >> std::min(by, kBits - 1));
    return by >= kBits ? T(0) : T(a >> by);
  };
  using F = decltype(shift);
  const Type type = parts.type();
  if (type.kind == 's')
    return type.bits == 16   ? ShiftOf<int16_t, F>()
           : type.bits == 32 ? ShiftOf<int32_t, F>()
                             : ShiftOf<int64_t, F>();
  return type.bits == 16   ? ShiftOf<uint16_t, F>()
         : type.bits == 32 ? ShiftOf<uint32_t, F>()
         : type.bits == 64 ? ShiftOf<uint64_t, F>()
                           : nullptr;
}
Handler DecodeShf(Parts& parts,
                  Instr&) {  // two words are shifted, one of them is wanted
  const bool left = parts.Take("l");
  if (!left && !parts.Take("r")) return nullptr;
  const bool wraps = parts.Take("wrap");
  if (!wraps && !parts.Take("clamp")) return nullptr;
  const auto l_wrap = [](uint32_t a, uint32_t b, uint32_t c) {
    return static_cast<uint32_t>(((uint64_t{b} << 32 | a) << (c & 31)) >> 32);
  };
  const auto r_wrap = [](uint32_t a, uint32_t b, uint32_t c) {
    return static_cast<uint32_t>((uint64_t{b} << 32 | a) >> (c & 31));
  };
  const auto l_clamp = [](uint32_t a, uint32_t b, uint32_t c) {
    return static_cast<uint32_t>(((uint64_t{b} << 32 | a) << std::min(c, 32u)) >>
                                 32);
  };
  const auto r_clamp = [](uint32_t a, uint32_t b, uint32_t c) {
    return static_cast<uint32_t>((uint64_t{b} << 32 | a) >> std::min(c, 32u));
  };
  if (left)
    return wraps ? Same<decltype(l_wrap), uint32_t, 3>()
                 : Same<decltype(l_clamp), uint32_t, 3>();
  return wraps ? Same<decltype(r_wrap), uint32_t, 3>()
               : Same<decltype(r_clamp), uint32_t, 3>();
}

template <typename F>
Handler ToCount(F, Parts& parts) {  // of bits: the result has 32
  const int bits = parts.type().bits;
  return bits == 32   ? &Map<F, uint32_t, uint32_t>
         : bits == 64 ? &Map<F, uint32_t, uint64_t>
                      : nullptr;
}
Handler DecodeBfind(Parts& parts, Instr&) {
  if (parts.Take("shiftamt"))
    return ToCount(
        [](auto a) {
          return a == 0           ? ~0u
                 : sizeof(a) == 8 ? __builtin_clzll(a)
                                  : __builtin_clz(a);
        },
        parts);
  if (parts.type().kind == 's') return nullptr;
  return ToCount(
      [](auto a) {
        return a == 0           ? ~0u
               : sizeof(a) == 8 ? 63u - __builtin_clzll(a)
                                : 31u - __builtin_clz(a);
      },
      parts);
}
template <typename T>
T Reversed(T value) {
  T reversed = 0;
  for (size_t i = 0; i < 8 * sizeof(T); ++i)
    reversed |= ((value >> i) & 1) << (8 * sizeof(T) - 1 - i);
  return reversed;
}
template <typename T>
T Field(T value, uint32_t from, uint32_t count) {  // bits of it
  using U = std::make_unsigned_t<T>;
  constexpr uint32_t kBits = 8 * sizeof(T);
  from &= 255, count &= 255;
  const bool negative =
      std::is_signed_v<T> && count != 0 &&
      ((static_cast<U>(value) >> std::min(from + count - 1, kBits - 1)) & 1) != 0;
  U result = from >= kBits ? 0 : static_cast<U>(value) >> from;
  const U mask = count >= kBits ? ~U{0} : (U{1} << count) - 1;
  result &= mask;
  // Bits past the number's own are its sign.
  const U there = from >= kBits ? 0
                  : from == 0   ? ~U{0}
                                : (U{1} << (kBits - from)) - 1;
  if (negative) result |= ~(mask & there);
  return static_cast<T>(result);
}
Handler DecodeBfe(Parts& parts, Instr&) {
  using F = decltype([](auto value, uint32_t from, uint32_t count) {
    return Field(value, from, count);
  });
  const std::string_view type = parts.last();
  return type == "u32"   ? &Map<F, uint32_t, uint32_t, uint32_t, uint32_t>
         : type == "s32" ? &Map<F, int32_t, int32_t, uint32_t, uint32_t>
         : type == "u64" ? &Map<F, uint64_t, uint64_t, uint32_t, uint32_t>
         : type == "s64" ? &Map<F, int64_t, int64_t, uint32_t, uint32_t>
                         : nullptr;
}
Handler DecodeBfi(Parts& parts, Instr&) {
  using F = decltype([](auto from, auto into, uint32_t at, uint32_t count) {
    using T = decltype(from);
    constexpr uint32_t kBits = 8 * sizeof(T);
    at &= 255, count &= 255;
    if (at >= kBits || count == 0) return into;
    const T mask = (count >= kBits ? ~T{0} : (T{1} << count) - 1) << at;
    return T((into & ~mask) | ((from << at) & mask));
  });
  const int bits = parts.type().bits;
  return bits == 32   ? &Map<F, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t>
         : bits == 64 ? &Map<F, uint64_t, uint64_t, uint64_t, uint32_t, uint32_t>
                      : nullptr;
}
uint32_t Permuted(uint32_t a, uint32_t b, uint32_t how) {
  const uint64_t bytes = uint64_t{b} << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t nibble = (how >> (4 * i)) & 15;
    uint32_t byte = (bytes >> (8 * (nibble & 7))) & 255;
    if ((nibble & 8) != 0) byte = (byte & 128) != 0 ? 255 : 0;
    result |= byte << (8 * i);
  }
  return result;
}
void Lop3(Warp& warp, const Instr& in) {  // a truth table of three bits
  uint32_t* const to = warp.Row<uint32_t>(in.ops[0]);
  const uint32_t* const a = warp.Row<const uint32_t>(in.ops[1]);
  const uint32_t* const b = warp.Row<const uint32_t>(in.ops[2]);
  const uint32_t* const c = warp.Row<const uint32_t>(in.ops[3]);
  const uint32_t table = *warp.Row<const uint32_t>(in.ops[4]);
  ForLanes(warp.active, [&](int lane) {
    uint32_t result = 0;
    for (int i = 0; i < 8; ++i) {
      if (((table >> i) & 1) == 0) continue;
      result |= ((i & 4) != 0 ? a[lane] : ~a[lane]) &
                ((i & 2) != 0 ? b[lane] : ~b[lane]) &
                ((i & 1) != 0 ? c[lane] : ~c[lane]);
    }
    to[lane] = result;
  });
}

// --- Comparisons
// -------------------------------------------------------------------

template <typename F>
Handler Comparing(F, Parts& parts) {
  const Type type = parts.type();
  const bool flushes = parts.Take("ftz");
  if (type.kind == 'f') {
    if (type.name == "f32") {
      using Flush =
          decltype([](float a, float b) { return F{}(Flushed(a), Flushed(b)); });
      return flushes ? &Compare<Flush, float> : &Compare<F, float>;
    }
    if (flushes) return nullptr;
    return type.name == "f64"    ? &Compare<F, double>
           : type.name == "f16"  ? &Compare<F, Half>
           : type.name == "bf16" ? &Compare<F, Bfloat>
                                 : nullptr;
  }
  if (type.kind == 's')
    return type.bits == 16   ? &Compare<F, int16_t>
           : type.bits == 32 ? &Compare<F, int32_t>
           : type.bits == 64 ? &Compare<F, int64_t>
                             : nullptr;
  return type.bits == 16   ? &Compare<F, uint16_t>
         : type.bits == 32 ? &Compare<F, uint32_t>
         : type.bits == 64 ? &Compare<F, uint64_t>
                           : nullptr;
}

Handler DecodeSetp(Parts& parts, Instr& in) {
  in.how = parts.Take("and")   ? kAnd
           : parts.Take("or")  ? kOr
           : parts.Take("xor") ? kXor
                               : kAlone;
  const bool is_float = IsFloat(parts);
  if (parts.Take("eq"))
    return Comparing([](auto a, auto b) { return a == b; }, parts);
  // Of floats, comparisons are false where one is not a number, and those in -u
  // true.
  if (parts.Take("ne")) {
    if (!is_float) return Comparing([](auto a, auto b) { return a != b; }, parts);
    return Comparing([](auto a, auto b) { return a < b || a > b; }, parts);
  }
  if (parts.Take("lt") || parts.Take("lo"))
    return Comparing([](auto a, auto b) { return a < b; }, parts);
  if (parts.Take("le") || parts.Take("ls"))
    return Comparing([](auto a, auto b) { return a <= b; }, parts);
  if (parts.Take("gt") || parts.Take("hi"))
    return Comparing([](auto a, auto b) { return a > b; }, parts);
  if (parts.Take("ge") || parts.Take("hs"))
    return Comparing([](auto a, auto b) { return a >= b; }, parts);
  if (!is_float) return nullptr;
  if (parts.Take("equ"))
    return Comparing([](auto a, auto b) { return !(a < b || a > b); }, parts);
  if (parts.Take("neu"))
    return Comparing([](auto a, auto b) { return !(a == b); }, parts);
  if (parts.Take("ltu"))
    return Comparing([](auto a, auto b) { return !(a >= b); }, parts);
  if (parts.Take("leu"))
    return Comparing([](auto a, auto b) { return !(a > b); }, parts);
  if (parts.Take("gtu"))
    return Comparing([](auto a, auto b) { return !(a <= b); }, parts);
  if (parts.Take("geu"))
    return Comparing([](auto a, auto b) { return !(a < b); }, parts);
  if (parts.Take("num"))
    return Comparing([](auto a, auto b) { return a == a && b == b; }, parts);
  if (parts.Take("nan"))
    return Comparing([](auto a, auto b) { return a != a || b != b; }, parts);
  return nullptr;
}
Handler DecodeSelp(Parts& parts, Instr&) {
  const int bits = parts.type().bits;
  return bits == 16   ? &Select<uint16_t>
         : bits == 32 ? &Select<uint32_t>
         : bits == 64 ? &Select<uint64_t>
                      : nullptr;
}
// --- Moves and conversions
// ---------------------------------------------------------

template <typename T>
void Move(Warp& warp, const Instr& in) {
  const T* const from = warp.Row<const T>(in.ops[1]);
  T* const to = warp.Row<T>(in.ops[0]);
  ForLanes(warp.active, [&](int lane) { to[lane] = from[lane]; });
}
/// Vectors in braces: their elements become one value, or a value becomes elements.
void Pack(Warp& warp, const Instr& in) {
  ForLanes(warp.active, [&](int lane) {
    uint64_t whole = 0;
    for (int i = 0; i < in.count; ++i)
      whole |= warp.Value(in.ops[1 + i], lane) << (i * in.ops[0].bits / in.count);
    warp.Set(in.ops[0], lane, whole);
  });
}
void Unpack(Warp& warp, const Instr& in) {
  const Operand& from = in.ops[in.count];
  ForLanes(warp.active, [&](int lane) {
    const uint64_t whole = warp.Value(from, lane);
    for (int i = 0; i < in.count; ++i)
      warp.Set(in.ops[i], lane, whole >> (i * from.bits / in.count));
  });
}
void MoveMask(Warp& warp, const Instr& in) {
  warp.SetMask(in.ops[0], warp.Mask(in.ops[1]));
}

/// A conversion: of a register of any width, whose lowest bits are the value.
template <typename From>
From Low(uint64_t value) {
  if constexpr (sizeof(From) == 1) return Bits<From>(static_cast<uint8_t>(value));
  if constexpr (sizeof(From) == 2) return Bits<From>(static_cast<uint16_t>(value));
  if constexpr (sizeof(From) == 4) return Bits<From>(static_cast<uint32_t>(value));
  if constexpr (sizeof(From) == 8) return Bits<From>(value);
}
template <typename To>
uint64_t High(To value) {  // signs fill the register
  if constexpr (std::is_integral_v<To>)
    return static_cast<uint64_t>(static_cast<int64_t>(value)) &
           (std::is_signed_v<To> ? ~uint64_t{0}
                                 : uint64_t{std::make_unsigned_t<To>(~To{0})});
  else if constexpr (sizeof(To) == 2)
    return Bits<uint16_t>(value);
  else if constexpr (sizeof(To) == 4)
    return Bits<uint32_t>(value);
  else
    return Bits<uint64_t>(value);
}
template <typename F, typename To, typename From>
void Convert(Warp& warp, const Instr& in) {
  ForLanes(warp.active, [&](int lane) {
    const From from = Low<From>(warp.Value(in.ops[1], lane));
    warp.Set(in.ops[0], lane, High<To>(F::template Do<To>(from)));
  });
}

/// Numbers become whole in one of four ways.
template <char kWay>
struct Whole {
  static double Of(double value) {
    if (kWay == 'z') return std::trunc(value);
    if (kWay == 'm') return std::floor(value);
    if (kWay == 'p') return std::ceil(value);
    return std::nearbyint(value);
  }
  template <typename To, typename From>
  static To Do(From from) {
    if constexpr (kIsFloat<From> && kIsFloat<To>) {
      if constexpr (std::is_same_v<From, double>)
        return To(Of(from));
      else
        return To(
            static_cast<float>(Of(static_cast<double>(static_cast<float>(from)))));
    } else if constexpr (kIsFloat<From>) {
      double value;
      if constexpr (std::is_same_v<From, double>)
        value = Of(from);
      else
        value = Of(static_cast<double>(static_cast<float>(from)));
      using Limits = std::numeric_limits<To>;
      if (value != value) {
        const bool wide = std::is_same_v<From, double> || sizeof(To) == 8;
        return wide ? To(std::make_unsigned_t<To>(1) << (8 * sizeof(To) - 1))
                    : To(0);
      }
      if (value <= static_cast<double>(Limits::min())) return Limits::min();
      if (value >= static_cast<double>(Limits::max())) return Limits::max();
      return static_cast<To>(value);
    } else {
      return To{};
    }
  }
};
struct Plain {
  template <typename To, typename From>
  static To Do(From from) {
    if constexpr (kIsFloat<From> && !kIsFloat<To>)
      return To{};
    else if constexpr (std::is_same_v<To, Half> || std::is_same_v<To, Bfloat>) {
      if constexpr (std::is_same_v<From, double>)
        return To(from);
      else if constexpr (kIsFloat<From>)
        return To(static_cast<float>(from));
      else if constexpr (sizeof(From) == 8)
        return To(ToOddOf(from));
      else
        return To(static_cast<double>(from));
    } else if constexpr (kIsFloat<From> && !std::is_floating_point_v<From>) {
      return static_cast<To>(static_cast<float>(from));
    } else {
      return static_cast<To>(from);
    }
  }
  /// Of 64 bits more than a double has: the last says whether there was more.
  template <typename T>
  static float ToOddOf(T value) {
    const bool negative = value < 0;
    uint64_t size =
        negative ? 0 - static_cast<uint64_t>(value) : static_cast<uint64_t>(value);
    if (size >> 53 != 0)
      size = (size & ~uint64_t{2047}) | ((size & 2047) != 0 ? 2048 : 0);
    const auto rounded = static_cast<double>(size);
    return ToOdd(negative ? -rounded : rounded);
  }
};
struct Clamping {  // .sat: floats to [0, 1], integers to what the result can be
  template <typename To, typename From>
  static To Do(From from) {
    if constexpr (kIsFloat<To>) {
      const To value = Plain::Do<To>(from);
      return value >= To(1.f) ? To(1.f) : value > To(0.f) ? value : To(0.f);
    } else if constexpr (kIsFloat<From>) {
      return To{};
    } else {
      const auto value = static_cast<__int128>(from);
      using Limits = std::numeric_limits<To>;
      return static_cast<To>(std::clamp<__int128>(value, __int128{Limits::min()},
                                                  __int128{Limits::max()}));
    }
  }
};

template <typename F, typename To>
Handler ConvertFrom(std::string_view from) {
  if (from == "u8" || from == "b8") return &Convert<F, To, uint8_t>;
  if (from == "u16" || from == "b16") return &Convert<F, To, uint16_t>;
  if (from == "u32" || from == "b32") return &Convert<F, To, uint32_t>;
  if (from == "u64" || from == "b64") return &Convert<F, To, uint64_t>;
  if (from == "s8") return &Convert<F, To, int8_t>;
  if (from == "s16") return &Convert<F, To, int16_t>;
  if (from == "s32") return &Convert<F, To, int32_t>;
  if (from == "s64") return &Convert<F, To, int64_t>;
  if (from == "f16") return &Convert<F, To, Half>;
  if (from == "bf16") return &Convert<F, To, Bfloat>;
  if (from == "f32") return &Convert<F, To, float>;
  if (from == "f64") return &Convert<F, To, double>;
  return nullptr;
}
template <typename F>
Handler ConvertTo(std::string_view to, std::string_view from) {
  if (to == "u8") return ConvertFrom<F, uint8_t>(from);
  if (to == "u16") return ConvertFrom<F, uint16_t>(from);
  if (to == "u32") return ConvertFrom<F, uint32_t>(from);
  if (to == "u64") return ConvertFrom<F, uint64_t>(from);
  if (to == "s8") return ConvertFrom<F, int8_t>(from);
  if (to == "s16") return ConvertFrom<F, int16_t>(from);
  if (to == "s32") return ConvertFrom<F, int32_t>(from);
  if (to == "s64") return ConvertFrom<F, int64_t>(from);
  if (to == "f16") return ConvertFrom<F, Half>(from);
  if (to == "bf16") return ConvertFrom<F, Bfloat>(from);
  if (to == "f32") return ConvertFrom<F, float>(from);
  if (to == "f64") return ConvertFrom<F, double>(from);
  return nullptr;
}

/// Two numbers become a pair; the first is the upper half.
template <typename T>
void PackFloats(Warp& warp, const Instr& in) {
  Pair<T>* const to = warp.Row<Pair<T>>(in.ops[0]);
  const float* const high = warp.Row<const float>(in.ops[1]);
  const float* const low = warp.Row<const float>(in.ops[2]);
  ForLanes(warp.active,
           [&](int lane) { to[lane] = Pair<T>{T(low[lane]), T(high[lane])}; });
}
template <int kExponent, int kMantissa>
void PackSmall(Warp& warp, const Instr& in) {
  const float* const high = warp.Row<const float>(in.ops[1]);
  const float* const low = warp.Row<const float>(in.ops[2]);
  ForLanes(warp.active, [&](int lane) {
    const uint32_t both = uint32_t{ToSmall<kExponent, kMantissa>(high[lane])} << 8 |
                          ToSmall<kExponent, kMantissa>(low[lane]);
    warp.Set(in.ops[0], lane, both);
  });
}
template <int kExponent, int kMantissa>
void PackSmallHalves(Warp& warp, const Instr& in) {
  ForLanes(warp.active, [&](int lane) {
    const auto pair =
        Bits<Pair<Half>>(static_cast<uint32_t>(warp.Value(in.ops[1], lane)));
    const uint32_t both = uint32_t{ToSmall<kExponent, kMantissa>(pair.high)} << 8 |
                          ToSmall<kExponent, kMantissa>(pair.low);
    warp.Set(in.ops[0], lane, both);
  });
}
template <int kExponent, int kMantissa>
void UnpackSmall(Warp& warp, const Instr& in) {
  ForLanes(warp.active, [&](int lane) {
    const auto both = static_cast<uint32_t>(warp.Value(in.ops[1], lane));
    const Pair<Half> pair{Half(FromSmall<kExponent, kMantissa>(both & 255)),
                          Half(FromSmall<kExponent, kMantissa>(both >> 8 & 255))};
    warp.Set(in.ops[0], lane, Bits<uint32_t>(pair));
  });
}
float Tf32(float value) {  // ties go away from zero
  if (!std::isfinite(value)) return value;
  return Bits<float>((Bits<uint32_t>(value) + 0x1000) & ~0x1fffu);
}

Handler DecodeCvt(Parts& parts, Instr& in) {
  const std::string_view to = parts.at(parts.count() - 2), from = parts.last();
  parts.Take(to);
  if (to == "tf32" && from == "f32" && (parts.Take("rna") || parts.Take("rn")))
    return Same<decltype([](float a) { return Tf32(a); }), float, 1>();
  if ((to == "e4m3x2" || to == "e5m2x2") && parts.Take("rn") &&
      parts.Take("satfinite")) {
    if (from == "f32") return to == "e4m3x2" ? &PackSmall<4, 3> : &PackSmall<5, 2>;
    if (from == "f16x2")
      return to == "e4m3x2" ? &PackSmallHalves<4, 3> : &PackSmallHalves<5, 2>;
    return nullptr;
  }
  if (to == "f16x2" && parts.Take("rn")) {
    if (from == "f32") return &PackFloats<Half>;
    return from == "e4m3x2"   ? &UnpackSmall<4, 3>
           : from == "e5m2x2" ? &UnpackSmall<5, 2>
                              : nullptr;
  }
  if (to == "bf16x2" && parts.Take("rn"))
    return from == "f32" ? &PackFloats<Bfloat> : nullptr;
  for (const char way : {'n', 'z', 'm', 'p'}) {
    if (!parts.Take(std::string("r") + way + "i")) continue;
    // Whole numbers have no subnormal ones, and what is flushed is 0 in the end, or
    // -1 and 1 where it is rounded away from zero.
    if (parts.Has("ftz") && way != 'n' && way != 'z') return nullptr;
    parts.Take("ftz");
    parts.Take("sat");  // to an integer: which all are
    if (from[0] != 'f' && from.substr(0, 2) != "bf") return nullptr;
    return way == 'n'   ? ConvertTo<Whole<'n'>>(to, from)
           : way == 'z' ? ConvertTo<Whole<'z'>>(to, from)
           : way == 'm' ? ConvertTo<Whole<'m'>>(to, from)
                        : ConvertTo<Whole<'p'>>(to, from);
  }
  const auto is_float = [](std::string_view type) {
    return type[0] == 'f' || type.substr(0, 2) == "bf";
  };
  if (is_float(from) && !is_float(to)) return nullptr;
  bool rounds = false;
  TakeMode(parts, in, rounds);
  const bool narrow = to == "f16" || to == "bf16";
  if (rounds && narrow) return nullptr;  // not the processor's rounding
  const bool flushes = parts.Take("ftz");
  const bool saturates = parts.Take("sat");
  if (flushes && (saturates || to != "f32" || from != "f32")) {
    // From and to doubles, a subnormal float would be another number.
    if (!(to == "f16" || to == "bf16" || from == "f16" || from == "bf16"))
      return nullptr;
  }
  if (flushes && to == "f32" && from == "f32")
    return Same<decltype([](float a) { return Flushed(a); }), float, 1>();
  const Handler found =
      saturates ? ConvertTo<Clamping>(to, from) : ConvertTo<Plain>(to, from);
  if (found == nullptr || !rounds) return found;
  in.inner = found;
  return &Rounded;
}

Handler DecodeMov(Parts& parts, Instr& in) {
  if (in.how == kPacks) return &Pack;
  if (in.how == kUnpacks) return &Unpack;
  if (parts.last() == "pred") return &MoveMask;
  const int bits = parts.type().bits;
  if (bits != in.ops[0].bits || bits != in.ops[1].bits) return nullptr;
  return bits == 16   ? &Move<uint16_t>
         : bits == 32 ? &Move<uint32_t>
                      : &Move<uint64_t>;
}

// --- Lanes of a warp
// ---------------------------------------------------------------

enum Shuffle { kUp, kDown, kButterfly, kIndex };

template <Shuffle kHow>
void Shfl(Warp& warp,
          const Instr& in) {  // ops: to, whether, from, by, clamp, members
  uint32_t needed = 0;
  ForLanes(warp.active,
           [&](int lane) { needed |= warp.Row<uint32_t>(in.ops[5])[lane]; });
  if (!warp.Gathered(needed)) return;
  const uint32_t* const by = warp.Row<const uint32_t>(in.ops[3]);
  const uint32_t* const how = warp.Row<const uint32_t>(in.ops[4]);
  uint32_t from[kLanes];
  std::memcpy(from, warp.Row<uint32_t>(in.ops[2]), sizeof(from));
  uint32_t* const to = warp.Row<uint32_t>(in.ops[0]);
  uint32_t within = 0;
  ForLanes(warp.active, [&](int lane) {
    const int step = static_cast<int>(by[lane] & 31);
    const int clamp = static_cast<int>(how[lane] & 31);
    const int segment = static_cast<int>((how[lane] >> 8) & 31);
    const int last = (lane & segment) | (clamp & ~segment);
    const int first = lane & segment;
    int source = kHow == kUp          ? lane - step
                 : kHow == kDown      ? lane + step
                 : kHow == kButterfly ? lane ^ step
                                      : first | (step & ~segment);
    const bool is_within = kHow == kUp ? source >= last : source <= last;
    if (!is_within) source = lane;
    to[lane] = from[source];
    within |= uint32_t{is_within} << lane;
  });
  if (in.ops[1].at != kNowhere) warp.SetMask(in.ops[1], within);
}
Handler DecodeShfl(Parts& parts, Instr&) {
  if (!parts.Take("sync")) return nullptr;
  if (parts.Take("up")) return &Shfl<kUp>;
  if (parts.Take("down")) return &Shfl<kDown>;
  if (parts.Take("bfly")) return &Shfl<kButterfly>;
  return parts.Take("idx") ? &Shfl<kIndex> : nullptr;
}

uint32_t Members(Warp& warp, const Operand& operand) {
  uint32_t needed = 0;
  ForLanes(warp.active,
           [&](int lane) { needed |= warp.Row<uint32_t>(operand)[lane]; });
  return needed;
}
template <char kHow>
void Vote(Warp& warp, const Instr& in) {  // ops: to, predicate, members
  const uint32_t needed = Members(warp, in.ops[2]);
  if (!warp.Gathered(needed)) return;
  const uint32_t voters = needed & warp.active;
  const uint32_t yes = warp.Mask(in.ops[1]) & voters;
  if (kHow == 'b') {
    uint32_t* const to = warp.Row<uint32_t>(in.ops[0]);
    ForLanes(warp.active, [&](int lane) { to[lane] = yes; });
  } else {
    const bool is = kHow == 'a'   ? yes == voters
                    : kHow == 'n' ? yes != 0
                                  : yes == 0 || yes == voters;
    warp.SetMask(in.ops[0], is ? ~0u : 0);
  }
}
Handler DecodeVote(Parts& parts, Instr&) {
  if (!parts.Take("sync")) return nullptr;
  if (parts.Take("ballot")) return &Vote<'b'>;
  if (parts.Take("all")) return &Vote<'a'>;
  if (parts.Take("any")) return &Vote<'n'>;
  return parts.Take("uni") ? &Vote<'u'> : nullptr;
}
template <bool kAll>
void Match(Warp& warp, const Instr& in) {  // ops: to, whether, value, members
  const uint32_t needed = Members(warp, in.ops[3]);
  if (!warp.Gathered(needed)) return;
  const uint32_t voters = needed & warp.active;
  uint64_t values[kLanes];
  ForLanes(warp.active,
           [&](int lane) { values[lane] = warp.Value(in.ops[2], lane); });
  uint32_t all = 0;
  ForLanes(warp.active, [&](int lane) {
    uint32_t equal = 0;
    ForLanes(voters, [&](int other) {
      equal |= uint32_t{values[other] == values[lane]} << other;
    });
    if (kAll && equal != voters) equal = 0;
    all |= uint32_t{equal != 0} << lane;
    warp.Set(in.ops[0], lane, equal);
  });
  if (in.ops[1].at != kNowhere) warp.SetMask(in.ops[1], all);
}
Handler DecodeMatch(Parts& parts, Instr&) {
  if (!parts.Take("sync")) return nullptr;
  if (parts.Take("any")) return &Match<false>;
  return parts.Take("all") ? &Match<true> : nullptr;
}
template <typename F, typename T>
void Redux(Warp& warp, const Instr& in) {  // ops: to, value, members
  const uint32_t needed = Members(warp, in.ops[2]);
  if (!warp.Gathered(needed)) return;
  const T* const from = warp.Row<const T>(in.ops[1]);
  T result = from[__builtin_ctz(warp.active)];
  ForLanes(warp.active & (warp.active - 1),
           [&](int lane) { result = F{}(result, from[lane]); });
  T* const to = warp.Row<T>(in.ops[0]);
  ForLanes(warp.active, [&](int lane) { to[lane] = result; });
}
Handler DecodeRedux(Parts& parts, Instr&) {
  if (!parts.Take("sync")) return nullptr;
  const auto choose = [&](auto f) -> Handler {
    using F = decltype(f);
    return parts.last() == "s32"     ? &Redux<F, int32_t>
           : parts.type().bits == 32 ? &Redux<F, uint32_t>
                                     : nullptr;
  };
  if (parts.last() == "f32") return nullptr;
  if (parts.Take("add"))
    return choose(
        [](auto a, auto b) { return decltype(a)(uint32_t(a) + uint32_t(b)); });
  if (parts.Take("min"))
    return choose([](auto a, auto b) { return std::min(a, b); });
  if (parts.Take("max"))
    return choose([](auto a, auto b) { return std::max(a, b); });
  if (parts.Take("and"))
    return choose([](auto a, auto b) { return decltype(a)(a & b); });
  if (parts.Take("or"))
    return choose([](auto a, auto b) { return decltype(a)(a | b); });
  if (parts.Take("xor"))
    return choose([](auto a, auto b) { return decltype(a)(a ^ b); });
  return nullptr;
}
void ActiveMask(Warp& warp, const Instr& in) {
  ForLanes(warp.active, [&](int lane) { warp.Set(in.ops[0], lane, warp.active); });
}
void Elect(Warp& warp, const Instr& in) {  // ops: to, whether, members
  const uint32_t needed = Members(warp, in.ops[2]);
  if (!warp.Gathered(needed)) return;
  const uint32_t first = warp.active & (0 - warp.active);
  ForLanes(warp.active,
           [&](int lane) { warp.Set(in.ops[0], lane, __builtin_ctz(first)); });
  warp.SetMask(in.ops[1], first);
}

// --- Control
// -----------------------------------------------------------------------

void Nothing(Warp&, const Instr&) {}
void Branch(Warp& warp, const Instr& in) { warp.Jump(in.target); }
void BranchIndexed(Warp& warp,
                   const Instr& in) {  // each lane to a place of its own
  const uint32_t* const index = warp.Row<const uint32_t>(in.ops[0]);
  const uint32_t first = index[__builtin_ctz(warp.active)];
  uint32_t same = 0;
  ForLanes(warp.active,
           [&](int lane) { same |= uint32_t{index[lane] == first} << lane; });
  if (first >= in.targets->size()) throw KernelFault("jumps to nowhere");
  if (same != warp.active) {  // the others come here again
    const uint32_t rest = warp.active & ~same;
    warp.Stop(Group::kReady, warp.at, 0);
    warp.groups.back().mask = rest;
    warp.mask |= same;
    warp.active = same;
  }
  warp.Jump((*in.targets)[first]);
}
void Return(Warp& warp, const Instr&) { warp.End(); }
/// A function's end: each lane goes on where it was called. ops: the row of these
/// places.
void ReturnTo(Warp& warp, const Instr& in) {
  const uint32_t* const places = warp.Row<const uint32_t>(in.ops[0]);
  const uint32_t first = places[__builtin_ctz(warp.active)];
  uint32_t same = 0;
  ForLanes(warp.active,
           [&](int lane) { same |= uint32_t{places[lane] == first} << lane; });
  if (same != warp.active) {
    const uint32_t rest = warp.active & ~same;
    warp.Stop(Group::kReady, warp.at, 0);
    warp.groups.back().mask = rest;
    warp.mask |= same;
    warp.active = same;
  }
  warp.Jump(first);
}
void Call(Warp& warp, const Instr& in) {  // ops: the row of places to return to
  uint32_t* const places = warp.Row<uint32_t>(in.ops[0]);
  ForLanes(warp.active, [&](int lane) { places[lane] = warp.at + 1; });
  warp.Jump(in.target);
}
void Barrier(Warp& warp, const Instr&) {
  warp.Stop(Group::kAtBarrier, warp.at + 1, 0);
}
void WarpBarrier(Warp& warp, const Instr& in) {
  warp.Gathered(Members(warp, in.ops[0]));
}
void Trap(Warp&, const Instr&) { throw KernelFault("stops itself (trap)"); }

}  // namespace

Handler CopyLocal() {
  return [](Warp& warp, const Instr& in) {  // between parameters of functions
    ForLanes(warp.active, [&](int lane) {
      char* const local = warp.local + size_t{warp.local_bytes} * lane;
      std::memcpy(local + in.target, local + in.offset,
                  static_cast<size_t>(in.how));
    });
  };
}

Handler Decode(const std::vector<std::string_view>& texts, Instr& in) {
  Parts parts(texts);
  const std::string_view op = texts[0];
  Handler found = nullptr;
  if (op == "add")
    found = DecodeAdd(parts, in);
  else if (op == "sub")
    found = DecodeSub(parts, in);
  else if (op == "addc")
    found = CarryHandler(parts, true, true);
  else if (op == "subc")
    found = CarryHandler(parts, false, true);
  else if (op == "mul")
    found = DecodeMul(parts, in);
  else if (op == "mad" || op == "fma")
    found = DecodeMad(parts, in);
  else if (op == "madc")
    found = DecodeMadc(parts, in);
  else if (op == "div")
    found = DecodeDiv(parts, in);
  else if (op == "rem")
    found = DecodeRem(parts, in);
  else if (op == "abs")
    found = DecodeAbs(parts, in);
  else if (op == "neg")
    found = DecodeNeg(parts, in);
  else if (op == "min")
    found = DecodeMin(parts, in);
  else if (op == "max")
    found = DecodeMax(parts, in);
  else if (op == "copysign")
    found = DecodeCopysign(parts, in);
  else if (op == "sqrt")
    found = PTX_FUNCTION(std::sqrt(x));
  else if (op == "rsqrt" && parts.last() == "f64" && parts.Take("approx")) {
    found = parts.Take("ftz")
                ? &UpperHalf<decltype([](double x) { return 1 / std::sqrt(x); })>
                : Same<decltype([](double x) { return 1 / std::sqrt(x); }), double,
                       1>();
  } else if (op == "rcp" && parts.last() == "f64" && parts.Take("approx") &&
             parts.Take("ftz"))
    found = &UpperHalf<decltype([](double x) { return 1 / x; })>;
  else if (op == "rsqrt")
    found = PTX_FUNCTION(1 / std::sqrt(x));
  else if (op == "rcp")
    found = Function(
        [](auto a) {
          using T = decltype(a);
          return T(T(1.f) / a);
        },
        parts, in);
  else if (op == "ex2")
    found = PTX_FUNCTION(std::exp2(x));
  else if (op == "lg2")
    found = PTX_FUNCTION(std::log2(x));
  else if (op == "sin")
    found = PTX_FUNCTION(std::sin(x));
  else if (op == "cos")
    found = PTX_FUNCTION(std::cos(x));
  else if (op == "tanh")
    found = PTX_FUNCTION(std::tanh(x));
  else if (op == "and")
    found = Logic([](auto a, auto b) { return decltype(a)(a & b); }, parts);
  else if (op == "or")
    found = Logic([](auto a, auto b) { return decltype(a)(a | b); }, parts);
  else if (op == "xor")
    found = Logic([](auto a, auto b) { return decltype(a)(a ^ b); }, parts);
  else if (op == "not") {
    const auto f = [](auto a) { return decltype(a)(~a); };
    found =
        parts.last() == "pred" ? &OnMasks<decltype(f), 1> : Wrapping<1>(f, parts);
  } else if (op == "cnot")
    found = Wrapping<1>([](auto a) { return decltype(a)(a == 0); }, parts);
  else if (op == "shl")
    found = DecodeShl(parts, in);
  else if (op == "shr")
    found = DecodeShr(parts, in);
  else if (op == "shf")
    found = DecodeShf(parts, in);
  else if (op == "popc")
    found =
        ToCount([](auto a) { return uint32_t(__builtin_popcountll(a)); }, parts);
  else if (op == "clz")
    found = ToCount(
        [](auto a) {
          constexpr uint32_t kBits = 8 * sizeof(a);
          return a == 0 ? kBits : uint32_t(__builtin_clzll(a)) - (64 - kBits);
        },
        parts);
  else if (op == "bfind")
    found = DecodeBfind(parts, in);
  else if (op == "brev")
    found = Wrapping<1>([](auto a) { return Reversed(a); }, parts);
  else if (op == "bfe")
    found = DecodeBfe(parts, in);
  else if (op == "bfi")
    found = DecodeBfi(parts, in);
  else if (op == "prmt" && parts.type().bits == 32)
    found = Same<decltype([](uint32_t a, uint32_t b, uint32_t c) {
                   return Permuted(a, b, c);
                 }),
                 uint32_t, 3>();
  else if (op == "lop3" && parts.type().bits == 32)
    found = &Lop3;
  else if (op == "setp")
    found = DecodeSetp(parts, in);
  else if (op == "selp")
    found = DecodeSelp(parts, in);
  else if (op == "cvt")
    found = DecodeCvt(parts, in);
  else if (op == "mov")
    found = DecodeMov(parts, in);
  else if (op == "shfl")
    found = DecodeShfl(parts, in);
  else if (op == "vote")
    found = DecodeVote(parts, in);
  else if (op == "match")
    found = DecodeMatch(parts, in);
  else if (op == "redux")
    found = DecodeRedux(parts, in);
  else if (op == "activemask")
    found = &ActiveMask;
  else if (op == "elect" && parts.Take("sync"))
    found = parts.End(&Elect);
  else if (op == "bra") {
    parts.Take("uni");
    return parts.End(&Branch);
  } else if (op == "brx" && parts.Take("idx")) {
    parts.Take("uni");
    return parts.End(&BranchIndexed);
  } else if (op == "ret") {
    parts.Take("uni");
    return parts.End(in.how == kInFunction ? &ReturnTo : &Return);
  } else if (op == "exit")
    return parts.End(&Return);
  else if (op == "call") {
    parts.Take("uni");
    return parts.End(&Call);
  } else if (op == "trap")
    return parts.End(&Trap);
  else if (op == "bar" || op == "barrier") {
    parts.Take("cta");
    parts.Take("aligned");
    if (parts.Take("warp"))
      return parts.Take("sync") ? parts.End(&WarpBarrier) : nullptr;
    return parts.Take("sync") && in.count == 1 ? parts.End(&Barrier) : nullptr;
  } else if (op == "griddepcontrol" || op == "membar" || op == "fence" ||
             op == "prefetch" || op == "nanosleep")
    return &Nothing;
  else
    return DecodeMemory(parts, op, in);
  return parts.End(found, /*typed=*/true);
}

}  // namespace ptx
