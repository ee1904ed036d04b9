// Queries as words of 16 bits and a unit, for sums in integers. Of the 16 bits 15 and the sign are used, up to kWhole: 256
// terms of them and 8-bit numbers fit into 32 bits. For files compiled for AVX512-BF16; everything here has internal
// linkage (see cpu_bf16.h).
#pragma once

#include "paged_attention/cpu_bf16.h"

namespace kvforge {
namespace {

constexpr float kWhole = 32639;         // 127 * 256 + 127
constexpr float kSmallest = 0x1p-110f;  // below which magnitudes are not told apart: its inverse times kWhole is finite

inline __m512i magnitude(__m512 x) {
  return _mm512_and_si512(reinterpret_cast<__m512i>(x), _mm512_set1_epi32(0x7fffffff));
}

// The largest of magnitudes, NaN if one is: as integers they order like this.
inline float largest(__m512i magnitudes) {
  return from_bits(static_cast<uint32_t>(
      _mm512_reduce_max_epi32(_mm512_max_epi32(magnitudes, _mm512_set1_epi32(0x08800000)))));  // kSmallest
}

inline __m512i join(__m512i low, __m512i high) { return _mm512_add_epi32(low, _mm512_slli_epi32(high, 8)); }

class QueryWords {
 public:
  QueryWords(const AttentionArgs& a, const bf16* q) : a_(a), q_(q) {
    __m512i high = _mm512_setzero_si512();
    for (int64_t d = 0; d < a.head_dim; d += 16) high = _mm512_max_epi32(high, magnitude(load(d)));
    top_ = largest(high);
    inverse_ = _mm512_set1_ps(kWhole / top_);
  }

  // The words of 16 dimensions, 0 from head_dim on.
  __m512i at(int64_t d) const { return _mm512_cvtps_epi32(_mm512_mul_ps(load(d), inverse_)); }

  // What sums of words and keys are multiplied by to be scores in units of log2(e).
  float factor() const {
    const float finite = top_ < __builtin_inff() ? top_ : __builtin_nanf("");  // an infinite product may be no number
    return a_.scale * a_.k_scale * kLog2E * (finite / kWhole);
  }

 private:
  __m512 load(int64_t d) const {
    const __mmask16 mask = d < a_.head_dim ? 0xffff : 0;
    const __m512i x = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, q_ + d));
    return reinterpret_cast<__m512>(_mm512_slli_epi32(x, 16));
  }

  const AttentionArgs& a_;
  const bf16* const q_;
  float top_;
  __m512 inverse_;
};

}  // namespace
}  // namespace kvforge
