// Quantizing a row on AVX-512. For files compiled for it; everything here has internal linkage.
#pragma once

#include <immintrin.h>

#include "packed_linear/cpu_int8.h"

namespace kvforge {
namespace {

inline __mmask32 first_lanes(int64_t count) { return count < 32 ? (1u << count) - 1 : 0xffffffffu; }

inline __m512 widen(__m256i x) {
  return reinterpret_cast<__m512>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

// As quantize_row_plainly; a row that is not finite becomes zeros and keeps its scale.
float quantize_row(const bf16* x, int64_t depth, uint8_t* out) {
  __m512i largest = _mm512_setzero_si512();  // bits of |x| are ordered as |x| is, NaN last
  for (int64_t i = 0; i < depth; i += 32) {
    const __m512i bits = _mm512_maskz_loadu_epi16(first_lanes(depth - i), x + i);
    largest = _mm512_max_epu16(largest, _mm512_and_si512(bits, _mm512_set1_epi16(0x7fff)));
  }
  const int32_t low = _mm512_reduce_max_epi32(_mm512_and_si512(largest, _mm512_set1_epi32(0xffff)));
  const int32_t high = _mm512_reduce_max_epi32(_mm512_srli_epi32(largest, 16));
  const float scale = row_scale(static_cast<uint32_t>(low > high ? low : high));
  const __m512 divisor = _mm512_set1_ps(scale);
  for (int64_t i = 0; i < depth; i += 16) {
    const __mmask16 mask = static_cast<__mmask16>(first_lanes(depth - i));
    const __m512 value = _mm512_div_ps(widen(_mm256_maskz_loadu_epi16(mask, x + i)), divisor);
    const __m128i bytes = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(value));
    _mm_mask_storeu_epi8(out + i, mask, _mm_xor_si128(bytes, _mm_set1_epi8(-128)));
  }
  return scale;
}

}  // namespace
}  // namespace kvforge
