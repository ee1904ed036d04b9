// Elements of a pool as bfloat16, exactly: e4m3, int8 and int4 fit. For files compiled for AVX512-BF16; everything
// here has internal linkage (see cpu_bf16.h).
#pragma once

#include "paged_attention/cpu_bf16.h"

namespace kvforge {
namespace {

constexpr uint16_t bf16_of_e4m3(int magnitude) {
  if (magnitude == 0) return 0;
  if (magnitude == 0x7f) return 0x7fc0;
  if (magnitude >= 8) return static_cast<uint16_t>((magnitude << 4) + (120 << 7));
  const int exponent = magnitude >= 4 ? 2 : magnitude >= 2 ? 1 : 0;  // a subnormal: magnitude * 2^-9
  return static_cast<uint16_t>(((127 - 9 + exponent) << 7) | ((magnitude << (7 - exponent)) & 0x7f));
}

struct E4m3Table {
  alignas(64) uint16_t of[128];
};

constexpr E4m3Table make_e4m3_table() {
  E4m3Table table{};
  for (int i = 0; i < 128; ++i) table.of[i] = bf16_of_e4m3(i);
  return table;
}

constexpr E4m3Table kE4m3 = make_e4m3_table();

inline __m512i load_masked(__mmask32 mask, const fp8* p) {
  const __m512i x = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(mask, p));
  const __m512i* table = reinterpret_cast<const __m512i*>(kE4m3.of);
  const __m512i low = _mm512_permutex2var_epi16(table[0], x, table[1]);  // by the lowest 6 bits
  const __m512i high = _mm512_permutex2var_epi16(table[2], x, table[3]);
  const __mmask32 is_high = _mm512_test_epi16_mask(x, _mm512_set1_epi16(0x40));
  const __m512i magnitude = _mm512_mask_blend_epi16(is_high, low, high);
  return _mm512_or_si512(magnitude, _mm512_slli_epi16(_mm512_and_si512(x, _mm512_set1_epi16(0x80)), 8));
}

inline __m512i load_masked(__mmask32 mask, const int8_t* p) {
  const __m256i x = _mm256_maskz_loadu_epi8(mask, p);
  const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(x)));
  const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(x, 1)));
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
}

// The bfloat16 numbers of 4 bits, twice: of an index in 16 bits, the lowest 5 count.
struct Int4Table {
  alignas(64) uint16_t of[32];
};

constexpr Int4Table make_int4_table() {
  constexpr uint16_t magnitude[9] = {0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100};
  Int4Table table{};
  for (int i = 0; i < 32; ++i) {
    const int code = i % 16;
    table.of[i] = code < 8 ? magnitude[code] : static_cast<uint16_t>(0x8000 | magnitude[16 - code]);
  }
  return table;
}

constexpr Int4Table kInt4 = make_int4_table();

// Numbers whose 4 bits are the lowest of each 16.
inline __m512i from_int4(__m512i bits) {
  return _mm512_permutexvar_epi16(bits, _mm512_load_si512(kInt4.of));
}

inline __m128i load_halves(__mmask32 mask, const int4* p) {  // the first 32 or 16 numbers
  return _mm_maskz_loadu_epi8(mask == 0xffffffffu ? 0xffff : mask == 0 ? 0 : 0xff, p);
}

inline __m512i load_masked(__mmask32 mask, const int4* p) {
  const __m512i bytes = _mm512_cvtepu8_epi32(load_halves(mask, p));
  return from_int4(_mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12)));
}

// The pair of a query at d, an even number; zeros from `dim` on.
inline uint32_t query_pair(const bf16* q, int64_t d, int64_t dim) {
  uint32_t pair = 0;
  if (d < dim) std::memcpy(&pair, q + d, sizeof pair);
  return pair;
}

// Calls body(Pool{}) with a value of the pool's type, which is not float32.
template <typename Body>
inline void with_pool(const PagedTensor& pool, const Body& body) {
  if (pool.type == Dtype::bfloat16) body(bf16{});
  else if (pool.type == Dtype::fp8) body(fp8{});
  else if (pool.type == Dtype::int4) body(int4{});
  else body(int8_t{});
}

// The same of bfloat16 and fp8.
template <typename Body>
inline void with_floats(const PagedTensor& pool, const Body& body) {
  pool.type == Dtype::bfloat16 ? body(bf16{}) : body(fp8{});
}

}  // namespace
}  // namespace kvforge
