// bfloat16, e4m3, int8 and int4 <-> float32 in plain integer arithmetic, for loops that the compiler vectorises.
// Used by files that are compiled once per instruction set: everything here has internal linkage.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace {

typedef uint16_t bf16;

// e4m3 without infinities: sign, 4 bits of exponent (bias 7), 3 of mantissa; 0x7f is NaN, 448 the largest.
struct fp8 {
  uint8_t bits;
};

// Two numbers in two's complement, the even one in the lower half.
struct int4 {
  uint8_t bits;
};

// What `count` numbers of a pool take, an even number of int4.
template <typename Pool>
constexpr int64_t bytes_of(int64_t count) {
  return std::is_same_v<Pool, int4> ? count / 2 : count * static_cast<int64_t>(sizeof(Pool));
}

// The place of number `i`, an even one of int4.
template <typename Pool>
inline const Pool* advance(const Pool* p, int64_t i) {
  return std::is_same_v<Pool, int4> ? p + i / 2 : p + i;
}

inline float from_bits(uint32_t bits) {
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

inline uint32_t to_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float to_float(float x) { return x; }
inline float to_float(int8_t x) { return x; }
inline float to_float(bf16 x) { return from_bits(static_cast<uint32_t>(x) << 16); }

inline float to_float(fp8 x) {
  const uint32_t magnitude = x.bits & 0x7f, sign = (x.bits & 0x80u) << 24;
  if (magnitude == 0x7f) return from_bits(sign | 0x7fc00000);
  if (magnitude < 8) return from_bits(sign | to_bits(static_cast<float>(magnitude) * 0x1p-9f));
  return from_bits(sign | ((magnitude << 20) + (120u << 23)));
}

// Rounds to nearest even; a NaN stays a NaN.
inline bf16 to_bf16(float x) {
  const uint32_t bits = to_bits(x);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return static_cast<bf16>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

// Rounds half to even; |x| at most 448, or NaN, which stays NaN.
inline fp8 to_fp8(float x) {
  const uint32_t bits = to_bits(x), magnitude = bits & 0x7fffffff;
  const uint32_t normal = ((magnitude + 0x7ffff + ((magnitude >> 20) & 1)) >> 20) - (120u << 3);
  // At 2^14 a unit in the last place is 2^-9, as among e4m3's subnormals.
  const uint32_t subnormal = to_bits(from_bits(magnitude) + 0x1p14f) - to_bits(0x1p14f);
  const uint32_t finite = magnitude < (121u << 23) ? subnormal : normal;
  return {static_cast<uint8_t>((bits >> 24 & 0x80) | (magnitude > 0x7f800000 ? 0x7f : finite))};
}

// Rounds half to even; |x| at most 127, or NaN, which becomes 0.
inline int8_t to_int8(float x) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const float rounded = (x + magic) - magic;
  return static_cast<int8_t>(static_cast<int32_t>(x == x ? rounded : 0.0f));
}

inline void store(float* target, float x) { *target = x; }
inline void store(bf16* target, float x) { *target = to_bf16(x); }
inline void store(fp8* target, float x) { *target = to_fp8(x); }
inline void store(int8_t* target, float x) { *target = to_int8(x); }

}  // namespace
