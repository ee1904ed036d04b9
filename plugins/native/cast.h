// bfloat16 <-> float32 in plain integer arithmetic, for loops that the compiler vectorises.
// Used by files that are compiled once per instruction set: everything here has internal linkage.
#pragma once

#include <cstdint>
#include <cstring>

namespace {

typedef uint16_t bf16;

inline float to_float(float x) { return x; }

inline float to_float(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

// Rounds to nearest even; a NaN stays a NaN.
inline bf16 to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return static_cast<bf16>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

inline void store(float* target, float x) { *target = x; }
inline void store(bf16* target, float x) { *target = to_bf16(x); }

}  // namespace
