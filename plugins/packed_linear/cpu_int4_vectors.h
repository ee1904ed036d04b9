// The vectors of int4's products: kOutputs outputs, each with four codes, values or sums in a word of 32 bits. Tiles have
// up to kTileRows rows by kWideVectors vectors (up to kTallRows rows) or kNarrowVectors.
// Used by files that are compiled once per instruction set: everything here has internal linkage.
#pragma once

#include <type_traits>

#include "native/simd.h"

namespace kvforge {
namespace {

#if defined(__AVX2__)
#define KVFORGE_INLINE inline __attribute__((always_inline))

#if defined(__AVX512F__)
using Bytes = __m512i;
using Floats = __m512;
constexpr int kOutputs = 16, kTileRows = 6, kTallRows = 2, kWideVectors = 4, kNarrowVectors = 2;
#define KVFORGE_VECTOR(operation) _mm512_##operation
KVFORGE_INLINE Bytes load_bytes_of(const char* p) { return _mm512_loadu_si512(p); }
KVFORGE_INLINE Bytes keep_low(Bytes x) { return _mm512_and_si512(x, _mm512_set1_epi8(0x0f)); }
KVFORGE_INLINE Bytes widen_bytes(const char* p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
// The low 16 bits of signed bytes, zeros above.
KVFORGE_INLINE Bytes widen_steps(const char* p) {
  const Bytes words = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm512_and_si512(words, _mm512_set1_epi32(0xffff));
}
// float16 that is zero or a normal number.
KVFORGE_INLINE Floats half_floats(const char* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
#else
using Bytes = __m256i;
using Floats = __m256;
constexpr int kOutputs = 8, kTileRows = 4, kTallRows = 1, kWideVectors = 4, kNarrowVectors = 1;
#define KVFORGE_VECTOR(operation) _mm256_##operation
KVFORGE_INLINE Bytes load_bytes_of(const char* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
KVFORGE_INLINE Bytes keep_low(Bytes x) { return _mm256_and_si256(x, _mm256_set1_epi8(0x0f)); }
KVFORGE_INLINE Bytes widen_bytes(const char* p) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
KVFORGE_INLINE Bytes widen_steps(const char* p) {
  const Bytes words = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  return _mm256_and_si256(words, _mm256_set1_epi32(0xffff));
}
// As above, without F16C.
KVFORGE_INLINE Floats half_floats(const char* p) {
  const Bytes bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const Bytes magnitude = _mm256_slli_epi32(_mm256_and_si256(bits, _mm256_set1_epi32(0x7fff)), 13);
  const Floats value = _mm256_castsi256_ps(magnitude) * _mm256_set1_ps(0x1p112f);
  const Bytes sign = _mm256_slli_epi32(_mm256_and_si256(bits, _mm256_set1_epi32(0x8000)), 16);
  return _mm256_or_ps(value, _mm256_castsi256_ps(sign));
}
#endif

KVFORGE_INLINE Bytes repeat(int32_t word) { return KVFORGE_VECTOR(set1_epi32)(word); }
KVFORGE_INLINE void unpack(const char* p, Bytes& low, Bytes& high) {
  const Bytes codes = load_bytes_of(p);
  low = keep_low(codes);
  high = keep_low(KVFORGE_VECTOR(srli_epi32)(codes, 4));
}
// Of integers of 16 bits in each word.
KVFORGE_INLINE Bytes multiply_words(Bytes a, Bytes b) { return KVFORGE_VECTOR(madd_epi16)(a, b); }

// A group's integers times the steps, 16 bits of either.
KVFORGE_INLINE void add_steps(Bytes& sum, Bytes integers, Bytes steps) {
#if defined(__AVX512VNNI__)
  asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(integers), "v"(steps));
#else
  sum = KVFORGE_VECTOR(add_epi32)(sum, KVFORGE_VECTOR(madd_epi16)(integers, steps));
#endif
}
KVFORGE_INLINE Floats to_floats(Bytes integers) { return KVFORGE_VECTOR(cvtepi32_ps)(integers); }

using Dots = Bytes;

// Sums of products begin as first_dots(shift) and are to_integers(sums, shift) then; in between shift is added.
#if defined(__AVX512VNNI__)
// GCC 12 copies the sums to the stack around the intrinsic; "+v" leaves them where they are.
KVFORGE_INLINE void add_products(Dots& sum, Bytes codes, Bytes values) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(values));
}
KVFORGE_INLINE Dots first_dots(Bytes shift) { return shift; }
KVFORGE_INLINE Bytes to_integers(Dots dots, Bytes) { return dots; }
#else
// Sums of 16 products of a group: at most 16 * 15 * 127 of either sign, which 16 bits hold.
KVFORGE_INLINE void add_products(Dots& sum, Bytes codes, Bytes values) {
  sum = KVFORGE_VECTOR(add_epi16)(sum, KVFORGE_VECTOR(maddubs_epi16)(codes, values));
}
KVFORGE_INLINE Dots first_dots(Bytes) { return Dots{}; }
KVFORGE_INLINE Bytes to_integers(Dots dots, Bytes shift) {
  return KVFORGE_VECTOR(add_epi32)(KVFORGE_VECTOR(madd_epi16)(dots, KVFORGE_VECTOR(set1_epi16)(1)), shift);
}
#endif
#undef KVFORGE_VECTOR
#undef KVFORGE_INLINE

#else  // one output at a time

using Bytes = uint32_t;
using Floats = float;
using Dots = int32_t;
constexpr int kOutputs = 1, kTileRows = 4, kTallRows = 4, kWideVectors = 4, kNarrowVectors = 4;

inline Bytes widen_bytes(const char* p) { return static_cast<uint8_t>(*p); }
inline Floats half_floats(const char* p) {
  uint16_t bits;
  std::memcpy(&bits, p, sizeof bits);
  const float value = from_bits((bits & 0x7fffu) << 13) * 0x1p112f;
  return from_bits(to_bits(value) | (bits & 0x8000u) << 16);
}
inline Bytes widen_steps(const char* p) { return static_cast<Bytes>(static_cast<int8_t>(*p)); }
inline Bytes repeat(int32_t word) { return static_cast<Bytes>(word); }
inline void unpack(const char* p, Bytes& low, Bytes& high) {
  std::memcpy(&low, p, sizeof low);
  high = low >> 4 & 0x0f0f0f0f;
  low &= 0x0f0f0f0f;
}
inline Bytes multiply_words(Bytes a, Bytes b) { return a * b; }
inline void add_products(Dots& sum, Bytes codes, Bytes values) {
  for (int i = 0; i < 32; i += 8) sum += static_cast<uint8_t>(codes >> i) * static_cast<int8_t>(values >> i);
}
inline Dots first_dots(Bytes shift) { return static_cast<Dots>(shift); }
inline Bytes to_integers(Dots dots, Bytes) { return static_cast<Bytes>(dots); }
inline void add_steps(Bytes& sum, Bytes integers, Bytes steps) { sum += integers * steps; }
inline Floats to_floats(Bytes integers) { return static_cast<float>(static_cast<int32_t>(integers)); }

#endif

// Sums, of words of 32 bits.
template <typename Sum>
inline Sum load_words(const float* p) {
  Sum sum;
  std::memcpy(&sum, p, sizeof sum);
  return sum;
}
template <typename Sum>
inline void store_words(float* p, Sum sum) { std::memcpy(p, &sum, sizeof sum); }

}  // namespace
}  // namespace kvforge
