// Quantizing a row on AVX-512. For files compiled for it; everything here has internal linkage.
#pragma once

#include <immintrin.h>

#include "packed_linear/cpu_int8.h"

namespace kvforge {
namespace {

inline __mmask32 first_lanes(int64_t count) { return count < 32 ? (1u << count) - 1 : 0xffffffffu; }

// Rounds x / scale half to even as a division does: to the product with 1 / scale is added what it misses, without which
// some halves, of max|x| / 2, would be rounded to the other side (tests/cpu/plugins/test_packed_linear_int8.py).
inline __m512i divide(__m512 x, __m512 scale, __m512 inverse) {
  const __m512 product = _mm512_mul_ps(x, inverse);
  return _mm512_cvtps_epi32(_mm512_fmadd_ps(_mm512_fnmadd_ps(product, scale, x), inverse, product));
}

// As quantize_row_plainly, of which each byte is changed by Flip; a row that is not finite becomes zeros and keeps its
// scale. Of the values, each 64 are written at the next `stride` bytes, zeros after the last up to a multiple of 64.
template <uint8_t Flip = 0>
float quantize_row(const bf16* x, int64_t depth, uint8_t* out, int64_t stride = 64) {
  __m512i largest = _mm512_setzero_si512();  // bits of |x| are ordered as |x| is, NaN last
  for (int64_t i = 0; i < depth; i += 32) {
    const __m512i bits = _mm512_maskz_loadu_epi16(first_lanes(depth - i), x + i);
    largest = _mm512_max_epu16(largest, _mm512_and_si512(bits, _mm512_set1_epi16(0x7fff)));
  }
  const int32_t low = _mm512_reduce_max_epi32(_mm512_and_si512(largest, _mm512_set1_epi32(0xffff)));
  const int32_t high = _mm512_reduce_max_epi32(_mm512_srli_epi32(largest, 16));
  const float scale = row_scale(static_cast<uint32_t>(low > high ? low : high));
  const float unit = scale < 0x1p-64f ? 0x1p64f : 1.0f;  // so that what a product misses is a normal number
  const __m512 units = _mm512_set1_ps(unit), divisor = _mm512_set1_ps(scale * unit);
  const __m512 inverse = _mm512_set1_ps(1.0f / (scale * unit));
  const auto integers = [&](__m512i upper) {
    return divide(_mm512_mul_ps(reinterpret_cast<__m512>(upper), units), divisor, inverse);
  };
  for (int64_t i = 0; i < depth; i += 32) {
    const __mmask32 mask = first_lanes(depth - i);
    const __m512i pairs = _mm512_maskz_loadu_epi16(mask, x + i);
    const __m512i even = integers(_mm512_slli_epi32(pairs, 16));
    const __m512i odd = integers(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
    const __m512i both = _mm512_mask_mov_epi16(even, 0xaaaaaaaa, _mm512_slli_epi32(odd, 16));
    const __m256i bytes = _mm256_xor_si256(_mm512_cvtepi16_epi8(both), _mm256_set1_epi8(static_cast<char>(Flip ^ 0x80)));
    const __m256i kept = _mm256_maskz_mov_epi8(mask, bytes);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i / 64 * stride + i % 64), kept);
  }
  if (depth % 64 != 0 && depth % 64 <= 32)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + depth / 64 * stride + 32), _mm256_setzero_si256());
  return scale;
}

}  // namespace
}  // namespace kvforge
