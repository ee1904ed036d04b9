// Vectors of float in GCC's vector extension, as wide as the instruction set this file is compiled for.
// Used by files that are compiled once per instruction set: everything here has internal linkage.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>

#include "native/cast.h"

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float vfloat __attribute__((vector_size(kLanes * 4)));
typedef int32_t vint __attribute__((vector_size(kLanes * 4)));
typedef uint16_t vbf16 __attribute__((vector_size(kLanes * 2)));

inline vfloat load(const float* p) {
  vfloat x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

inline vfloat load(const bf16* p) {
  vbf16 x;
  std::memcpy(&x, p, sizeof x);
  return reinterpret_cast<vfloat>(__builtin_convertvector(x, vint) << 16);
}

// Bytes as integers; GCC 12 takes a conversion of vectors from bytes apart into scalars.
inline vint load_bytes(const int8_t* p) {
#if defined(__AVX512F__)
  return reinterpret_cast<vint>(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return reinterpret_cast<vint>(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  return vint{p[0], p[1], p[2], p[3]};
#endif
}

inline vfloat load(const int8_t* p) { return __builtin_convertvector(load_bytes(p), vfloat); }

// The numbers whose e4m3 bits are the lowest of the lanes; the others do not matter.
inline vfloat from_e4m3(vint bits) {
  const vint magnitude = bits & 0x7f;
  const vfloat subnormal = __builtin_convertvector(magnitude, vfloat) * 0x1p-9f;
  vint value = magnitude < 8 ? reinterpret_cast<vint>(subnormal) : (magnitude << 20) + (120 << 23);
  value = magnitude == 0x7f ? vint{} + 0x7fc00000 : value;
  return reinterpret_cast<vfloat>(value | (bits & 0x80) << 24);
}

inline vfloat load(const fp8* p) { return from_e4m3(load_bytes(reinterpret_cast<const int8_t*>(p))); }

inline void store(float* p, vfloat x) { std::memcpy(p, &x, sizeof x); }

// x rounded to nearest even, a bfloat16 in the upper half of each lane; a NaN must have zeros in its lower half.
inline vint round_to_bf16(vfloat x) {
  const vint bits = reinterpret_cast<vint>(x);
  return bits + 0x7fff + ((bits >> 16) & 1);
}

// Writes the upper halves of the lanes.
inline void store_upper(bf16* p, vint x) {
  const vbf16 halves = __builtin_convertvector(x >> 16, vbf16);
  std::memcpy(p, &halves, sizeof halves);
}

// Writes those of two vectors.
inline void store_upper(bf16* p, vint first, vint second) {
#if defined(__AVX512BW__)
  alignas(64) static constexpr int16_t kUpper[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                                     33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  _mm512_storeu_si512(p, _mm512_permutex2var_epi16(reinterpret_cast<__m512i>(first), _mm512_load_si512(kUpper),
                                                   reinterpret_cast<__m512i>(second)));
#else
  store_upper(p, first);
  store_upper(p + kLanes, second);
#endif
}

inline vfloat broadcast(float x) { return x - vfloat{}; }  // plus 0 would be an addition: it changes -0

// The lanes' numbers, 0, 1, 2, ...
inline vint iota() {
  vint x;
  for (int i = 0; i < kLanes; ++i) x[i] = i;
  return x;
}

inline vfloat load(const int4* p) {
  uint32_t words[kLanes > 8 ? 2 : 1] = {};
  std::memcpy(words, p, kLanes / 2);
  vint x = vint{} + static_cast<int32_t>(words[0]);
  if constexpr (kLanes > 8) x = iota() < 8 ? x : vint{} + static_cast<int32_t>(words[kLanes > 8]);
  return __builtin_convertvector((x << (28 - 4 * (iota() & 7))) >> 28, vfloat);
}

inline vfloat maximum(vfloat a, vfloat b) { return a > b ? a : b; }

// The lanes shifted down by `width`, cyclically.
template <int width>
inline vfloat rotate_lanes(vfloat x) {
  return __builtin_shuffle(x, (iota() + width) & (kLanes - 1));
}

inline float sum(vfloat x) {
  if constexpr (kLanes > 8) x += rotate_lanes<8>(x);
  if constexpr (kLanes > 4) x += rotate_lanes<4>(x);
  x += rotate_lanes<2>(x);
  x += rotate_lanes<1>(x);
  return x[0];
}

inline float maximum(vfloat x) {
  if constexpr (kLanes > 8) x = maximum(x, rotate_lanes<8>(x));
  if constexpr (kLanes > 4) x = maximum(x, rotate_lanes<4>(x));
  x = maximum(x, rotate_lanes<2>(x));
  return maximum(x, rotate_lanes<1>(x))[0];
}

// e^x for x <= 0, to about one unit in the last place; 0 below -87 (Cephes' expf polynomial).
inline vfloat exp_nonpositive(vfloat x) {
  const vfloat clamped = x < -87.0f ? broadcast(-87.0f) : x;  // a NaN stays a NaN
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const vfloat n = (clamped * 1.44269504088896341f + magic) - magic;
  const vfloat r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
  vfloat p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const vint exponent = __builtin_convertvector(n, vint) << 23;
  const vfloat result = reinterpret_cast<vfloat>(reinterpret_cast<vint>(p) + exponent);
  return x < -87.0f ? vfloat{} : result;
}

}  // namespace
