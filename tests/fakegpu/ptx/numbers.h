// Numbers of 16 bits, which C++ has no types for, and what arithmetic of PTX asks
// of numbers.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

namespace ptx {

template <typename To, typename From>
inline To Bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

/// Rounds a double to a float so that rounding the float again, to fewer bits, is
/// exact: a result between two floats becomes the one whose last bit is odd.
inline float ToOdd(double value) {
  const float nearest = static_cast<float>(value);
  if (static_cast<double>(nearest) == value || value != value ||
      std::isinf(nearest))
    return nearest;
  const auto bits = Bits<uint32_t>(nearest);
  if ((bits & 1) != 0) return nearest;
  const bool too_great = (static_cast<double>(nearest) > value) == (value > 0);
  return Bits<float>(too_great ? bits - 1 : bits + 1);
}

struct Half {
  uint16_t bits;
  Half() = default;
  explicit Half(float value) : bits(Bits<uint16_t>(static_cast<_Float16>(value))) {}
  explicit Half(double value) : Half(ToOdd(value)) {}
  operator float() const { return static_cast<float>(Bits<_Float16>(bits)); }
};

struct Bfloat {
  uint16_t bits;
  Bfloat() = default;
  explicit Bfloat(float value) {
    auto whole = Bits<uint32_t>(value);
    if (value != value) {
      bits = 0x7fff;
      return;
    }
    whole += 0x7fff + ((whole >> 16) & 1);
    bits = static_cast<uint16_t>(whole >> 16);
  }
  explicit Bfloat(double value) : Bfloat(ToOdd(value)) {}
  operator float() const { return Bits<float>(uint32_t{bits} << 16); }
};

/// Two numbers of 16 bits in a register of 32.
template <typename T>
struct Pair {
  T low, high;
};

template <typename T>
constexpr bool kIsFloat = std::is_floating_point_v<T> || std::is_same_v<T, Half> ||
                          std::is_same_v<T, Bfloat>;

inline float Fma(float a, float b, float c) { return std::fma(a, b, c); }
inline double Fma(double a, double b, double c) { return std::fma(a, b, c); }
inline Half Fma(Half a, Half b, Half c) {
  return Half(std::fma(double(float(a)), double(float(b)), double(float(c))));
}
inline Bfloat Fma(Bfloat a, Bfloat b, Bfloat c) {
  return Bfloat(std::fma(double(float(a)), double(float(b)), double(float(c))));
}

inline float Flushed(float value) {
  return std::fabs(value) < std::numeric_limits<float>::min()
             ? std::copysign(0.f, value)
             : value;
}
inline double Flushed(double value) { return value; }

/// The result that all instructions give for what is not a number.
template <typename T>
inline T Nan() {
  if constexpr (std::is_same_v<T, float>) return Bits<float>(0x7fffffffu);
  if constexpr (std::is_same_v<T, double>)
    return Bits<double>(0x7fffffffffffffffull);
  if constexpr (std::is_same_v<T, Half> || std::is_same_v<T, Bfloat>) {
    T value;
    value.bits = 0x7fff;
    return value;
  }
}

template <typename T>
inline bool SignOf(T value) {
  if constexpr (std::is_same_v<T, Half> || std::is_same_v<T, Bfloat>)
    return (value.bits >> 15) != 0;
  else
    return std::signbit(value);
}

/// The smaller number; -0 is smaller than 0. `nan`: what is not a number wins, and
/// loses otherwise.
template <bool nan, typename T>
inline T Min(T a, T b) {
  if (a != a) return nan ? Nan<T>() : b != b ? Nan<T>() : b;
  if (b != b) return nan ? Nan<T>() : a;
  if (a == b) return SignOf(a) ? a : b;
  return a < b ? a : b;
}
template <bool nan, typename T>
inline T Max(T a, T b) {
  if (a != a) return nan ? Nan<T>() : b != b ? Nan<T>() : b;
  if (b != b) return nan ? Nan<T>() : a;
  if (a == b) return SignOf(a) ? b : a;
  return a > b ? a : b;
}

/// 8-bit floats, as conversions make and read them: e4m3 (no infinity) and e5m2.
template <int kExponent, int kMantissa>
inline float FromSmall(uint8_t bits) {
  constexpr int kBias = (1 << (kExponent - 1)) - 1;
  const int exponent = (bits >> kMantissa) & ((1 << kExponent) - 1);
  const int mantissa = bits & ((1 << kMantissa) - 1);
  const float sign = (bits & 0x80) != 0 ? -1.f : 1.f;
  if (kExponent == 4 && (bits & 0x7f) == 0x7f) return Nan<float>();
  if (kExponent == 5 && exponent == 31)
    return mantissa != 0 ? Nan<float>()
                         : sign * std::numeric_limits<float>::infinity();
  if (exponent == 0)
    return sign * std::ldexp(float(mantissa), 1 - kBias - kMantissa);
  return sign * std::ldexp(1.f + std::ldexp(float(mantissa), -kMantissa),
                           exponent - kBias);
}
template <int kExponent, int kMantissa>
inline uint8_t ToSmall(
    float value) {  // what is too great becomes the greatest number
  constexpr int kBias = (1 << (kExponent - 1)) - 1;
  constexpr uint8_t kGreatest = kExponent == 4 ? 0x7e : 0x7b;
  if (value != value) return 0x7f;
  const uint8_t sign = std::signbit(value) ? 0x80 : 0;
  const float size = std::fabs(value);
  if (size == 0) return sign;
  int exponent;
  std::frexp(size, &exponent);
  exponent = std::max(exponent - 1, 1 - kBias);
  const float units = std::nearbyint(std::ldexp(size, kMantissa - exponent));
  if (!(units < 4096)) return sign | kGreatest;
  int code = static_cast<int>(units) + ((exponent + kBias - 1) << kMantissa);
  if (code > kGreatest) code = kGreatest;
  return sign | static_cast<uint8_t>(code);
}

}  // namespace ptx
