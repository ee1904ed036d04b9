// What follows the matrix product, on AVX-512: bias, gate, residual and one rounding of each row of a panel, in
// registers. Compiled once per instruction set into namespace KVFORGE_ISA, so no inline function with external linkage may
// be used here.
#include <immintrin.h>

#include "packed_linear/cpu_kernel.h"

namespace kvforge {
namespace {

constexpr int kVectors = kPanel / 16;

inline __mmask16 first_lanes(int64_t count) {
  return count >= 16 ? 0xffff : count <= 0 ? 0 : static_cast<__mmask16>((1u << count) - 1);
}

inline __m512 load_bf16(const uint16_t* p, __mmask16 mask) {
  return reinterpret_cast<__m512>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p)), 16));
}

// 1 / x to about one unit in the last place, for x in [1, 2^126].
inline __m512 reciprocal(__m512 x) {
  const __m512 r = _mm512_rcp14_ps(x);
  return _mm512_fmadd_ps(r, _mm512_fnmadd_ps(x, r, _mm512_set1_ps(1.0f)), r);
}

// x / (1 + e^-x), with 2^f by a minimax polynomial: relative error below 4e-6, where a bfloat16 keeps 4e-3 and float32
// outputs are of layers without a gate.
inline __m512 silu(__m512 x) {
  const __m512 t = _mm512_min_ps(_mm512_set1_ps(125.0f), _mm512_mul_ps(x, _mm512_set1_ps(-1.44269504088896341f)));
  const __m512 n = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(t, n);
  __m512 p = _mm512_set1_ps(9.57010169e-3f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.59178603e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.40247448e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.93121815e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.99999261e-1f));
  return _mm512_mul_ps(x, reciprocal(_mm512_add_ps(_mm512_scalef_ps(p, n), _mm512_set1_ps(1.0f))));
}

// Two vectors rounded to nearest even, low's first; a NaN stays a NaN.
inline __m512i to_bf16(__m512 high, __m512 low) {
#if defined(__AVX512BF16__)
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
#else
  const auto round = [](__m512 x) {
    const __m512i bits = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __m512i result = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q),
                                                 _mm512_set1_epi32(0x7fc00000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(result, 16));
  };
  return _mm512_inserti64x4(_mm512_castsi256_si512(round(low)), round(high), 1);
#endif
}

template <bool Gated, bool Float32>
void finish_rows(const LinearArgs& a, int64_t begin, int64_t num_rows, int64_t panel, const float* sums) {
  constexpr int kOut = Gated ? kVectors / 2 : kVectors;
  const int64_t first = panel * kOut * 16;
  __mmask16 mask[kOut];
  __m512 bias[kVectors];
  for (int j = 0; j < kOut; ++j) mask[j] = first_lanes(a.outputs - first - j * 16);
  for (int j = 0; j < kVectors; ++j) {
    const int64_t at = first + j % kOut * 16 + (j < kOut ? 0 : a.outputs);
    bias[j] = a.bias == nullptr ? _mm512_setzero_ps() : load_bf16(a.bias + at, mask[j % kOut]);
  }
  for (int64_t r = begin; r < begin + num_rows; ++r, sums += kPanel) {
    __m512 x[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) x[j] = _mm512_loadu_ps(sums + j * 16);
    if (a.bias != nullptr) {
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) x[j] = _mm512_add_ps(x[j], bias[j]);
    }
    if constexpr (Gated) {
#pragma GCC unroll 4
      for (int j = 0; j < kOut; ++j) x[j] = _mm512_mul_ps(silu(x[j]), x[j + kOut]);
    }
    if (a.residual != nullptr) {
      const uint16_t* residual = a.residual + r * a.residual_stride + first;
#pragma GCC unroll 4
      for (int j = 0; j < kOut; ++j) x[j] = _mm512_add_ps(x[j], load_bf16(residual + j * 16, mask[j]));
    }
    if constexpr (Float32) {
      float* out = static_cast<float*>(a.out) + first_of_out(a, r) + first;
#pragma GCC unroll 4
      for (int j = 0; j < kOut; ++j) _mm512_mask_storeu_ps(out + j * 16, mask[j], x[j]);
    } else {
      uint16_t* out = static_cast<uint16_t*>(a.out) + first_of_out(a, r) + first;
#pragma GCC unroll 4
      for (int j = 0; j < kOut; j += 2)
        _mm512_mask_storeu_epi16(out + j * 16, _mm512_kunpackw(mask[j + 1], mask[j]),
                                 to_bf16(x[j + 1], x[j]));
    }
  }
}

}  // namespace

namespace KVFORGE_ISA {

void finish_linear(const LinearArgs& a, int64_t begin, int64_t num_rows, int64_t panel, const float* sums) {
  const auto finish = a.gated ? (a.float32_out ? finish_rows<true, true> : finish_rows<true, false>)
                              : (a.float32_out ? finish_rows<false, true> : finish_rows<false, false>);
  finish(a, begin, num_rows, panel, sums);
}

}  // namespace KVFORGE_ISA
}  // namespace kvforge
