// What the two halves of the bfloat16 kernel share: everything here has internal linkage. For files compiled
// for AVX512-BF16, in which no inline function with external linkage may be used: the linker could choose it
// for other files too. Exponents are in units of log2(e): exp(x) is computed as 2^(x log2(e)).
#pragma once

#include <immintrin.h>

#include <cstring>

#include "native/cast.h"
#include "native/hadamard.h"
#include "paged_attention/cpu_kernel.h"
#include "paged_attention/cpu_rows.h"
#include "paged_attention/cpu_scales.h"

namespace kvforge {

namespace isa_avx512_bf16 {

// Tiles, in cpu_bf16_tile.cpp.
int64_t bf16_packed_bytes(const AttentionArgs& args);
int64_t bf16_tile_scratch_bytes(const AttentionArgs& args);
void bf16_pack(const AttentionArgs& args, const Rows& rows, int64_t begin, char* packed);
void bf16_tile(const AttentionArgs& args, const Rows& rows, int64_t begin, int64_t end, const char* packed,
               char* scratch, float* partial);

// Few rows per key, in cpu_bf16_direct.cpp.
int64_t bf16_direct_scratch_bytes(const AttentionArgs& args, int64_t rows);
void bf16_direct(const AttentionArgs& args, const DirectWork& work, const DirectWork* next, char* scratch);

}  // namespace isa_avx512_bf16

namespace {

constexpr int64_t kMaxHeadDim = 256;
constexpr float kLog2E = 1.44269504088896341f;

inline __m512i load_masked(__mmask32 mask, const bf16* p) { return _mm512_maskz_loadu_epi16(mask, p); }

inline __mmask16 lanes_between(int64_t j, int64_t first, int64_t last) {  // lanes i with first <= j + i < last
  const int64_t low = smaller(larger(first - j, 0), 16), high = smaller(larger(last - j, 0), 16);
  return static_cast<__mmask16>((0xffffu << low) & ((1u << high) - 1));
}

// 2^x for x <= 0, relative error below 3e-6 by a minimax polynomial of the fraction (a bfloat16 weight keeps 4e-3).
inline __m512 exp2_nonpositive(__m512 exponent) {
  const __m512 f = _mm512_reduce_ps(exponent, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // in [0, 1)
  __m512 p = _mm512_set1_ps(1.35341706e-02f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.20114638e-02f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.41442755e-01f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.93003833e-01f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.00000262e+00f));
  return _mm512_scalef_ps(p, exponent);  // by 2^floor(exponent)
}

// 2^(x scale - peak). The product is rounded as the peak was, so that the exponent is never positive: not to be fused into
// one operation.
inline __m512 weight_of(__m512 x, __m512 scale, __m512 peak) {
  const __m512 product = _mm512_mul_round_ps(x, scale, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return exp2_nonpositive(_mm512_sub_ps(product, peak));
}

inline void store_bf16(bf16* p, __m512 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
}

// A row's sums over all the key blocks so far: `sums` of weight * v, and the sum of the weights, 2^(score - top).
struct RowSums {
  float* sums;
  float top = -__builtin_inff(), total = 0;
};

// Adds the sums over one more block, which has a top of its own. All results are made of this, block by block in the
// order of the keys: so a row has the same bits whatever way its blocks come here.
inline void add_block(RowSums& row, const float* sums, float top, float total, int64_t dim) {
  if (total == 0) return;  // none of its keys is seen
  const float before = row.top;
  row.top = before > top ? before : top;
  const float shrink = before == row.top ? 1.0f : __builtin_exp2f(before - row.top);
  const float grow = top == row.top ? 1.0f : __builtin_exp2f(top - row.top);
  row.total = __builtin_fmaf(total, grow, row.total * shrink);
  for (int64_t d = 0; d < dim; d += 16) {
    const __m512 old = _mm512_mul_ps(_mm512_loadu_ps(row.sums + d), _mm512_set1_ps(shrink));
    _mm512_storeu_ps(row.sums + d, _mm512_fmadd_ps(_mm512_loadu_ps(sums + d), _mm512_set1_ps(grow), old));
  }
}

// head_dim is a multiple of 16; top is in units of log2(e).
inline void finish_row(const AttentionArgs& a, const Rows& rows, int64_t row, const float* acc, float top, float total,
                float* partial) {
  if (partial != nullptr) {
    float* target = partial + (row - rows.row_begin) * (a.head_dim + 2);
    for (int64_t d = 0; d < a.head_dim; d += 16) _mm512_storeu_ps(target + d, _mm512_loadu_ps(acc + d));
    target[a.head_dim] = top;
    target[a.head_dim + 1] = total;
    return;
  }
  float rotated[kMaxHeadDim];
  if (a.v.type == Dtype::int4) {
    std::memcpy(rotated, acc, a.head_dim * sizeof(float));
    rotate_blocks(rotated, a.head_dim);
    acc = rotated;
  }
  bf16* out = static_cast<bf16*>(a.out) + token_head(a, rows, row) * a.head_dim;
  if (a.sinks != nullptr) total += __builtin_exp2f(a.sinks[query_head(a, rows, row)] * kLog2E - top);
  const __m512 inverse = _mm512_set1_ps(a.v_scale / total);
  for (int64_t d = 0; d < a.head_dim; d += 16)
    store_bf16(out + d, _mm512_mul_ps(_mm512_loadu_ps(acc + d), inverse));
}

// weights[0 .. width) = 2^(x - top) for [first, last) and 0 elsewhere, where x is factor * score * K's scale and
// top the larger of *top and these; updates *top, returns the float32 sum. What is stored then carries V's scale.
// width a multiple of 16, first < last. Masked is false when every score counts.
template <bool Masked, bool Scaled>
inline float softmax_row(const float* scores, bf16* weights, int64_t width, int64_t first, int64_t last,
                         float factor, const BlockScales& scales, float* top) {
  const __m512 scale = _mm512_set1_ps(factor);
  const auto score = [&](int64_t j) {
    const __m512 x = _mm512_loadu_ps(scores + j);
    return Scaled ? _mm512_mul_ps(x, _mm512_loadu_ps(scales.k + j)) : x;
  };
  __m512 highest = _mm512_set1_ps(*top);
  const int64_t begin = Masked ? first / 16 * 16 : 0, end = Masked ? round_up(last, 16) : width;
  for (int64_t j = begin; j < end; j += 16) {
    const __mmask16 seen = Masked ? lanes_between(j, first, last) : 0xffff;
    highest = _mm512_mask_max_ps(highest, seen, highest, _mm512_mul_ps(score(j), scale));
  }
  *top = _mm512_reduce_max_ps(highest);
  const __m512 peak = _mm512_set1_ps(*top);
  __m512 total = _mm512_setzero_ps();
  for (int64_t j = begin; j < end; j += 16) {
    const __mmask16 seen = Masked ? lanes_between(j, first, last) : 0xffff;
    __m512 p = weight_of(score(j), scale, peak);
    p = _mm512_maskz_mov_ps(seen, p);
    total = _mm512_add_ps(total, p);
    if (Scaled) p = _mm512_maskz_mul_ps(seen, p, _mm512_loadu_ps(scales.v + j));
    store_bf16(weights + j, p);
  }
  if (Masked) {
    std::memset(weights, 0, begin * sizeof(bf16));
    std::memset(weights + end, 0, (width - end) * sizeof(bf16));
  }
  return _mm512_reduce_add_ps(total);
}

inline float softmax_row(const AttentionArgs& a, const float* scores, bf16* weights, int64_t width, int64_t first,
                  int64_t last, const BlockScales& scales, float* top) {
  const float factor = a.scale * a.k_scale * kLog2E;
  const bool whole = first == 0 && last == width;
  if (scales.k == nullptr)
    return whole ? softmax_row<false, false>(scores, weights, width, first, last, factor, scales, top)
                 : softmax_row<true, false>(scores, weights, width, first, last, factor, scales, top);
  return whole ? softmax_row<false, true>(scores, weights, width, first, last, factor, scales, top)
               : softmax_row<true, true>(scores, weights, width, first, last, factor, scales, top);
}

// Puts rows together whose keys were split into blocks.
inline void merge_blocks(const AttentionArgs& args, const Rows& rows, int64_t splits) {
  const int64_t count = num_rows(rows), dim = args.head_dim, stride = dim + 2;
  for (int64_t r = 0; r < count; ++r) {
    float sums[kMaxHeadDim] = {};
    RowSums row{sums};
    for (int64_t s = 0; s < splits; ++s) {
      const float* part = rows.partial + (s * count + r) * stride;
      add_block(row, part, part[dim], part[dim + 1], dim);
    }
    finish_row(args, rows, rows.row_begin + r, sums, row.top, row.total, nullptr);
  }
}

// Indices that interleave two vectors of 32: their first halves, their second halves.
inline __m512i pairs_low() {
  return _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4,
                          35, 3, 34, 2, 33, 1, 32, 0);
}

inline __m512i pairs_high() { return _mm512_add_epi16(pairs_low(), _mm512_set1_epi16(16)); }

}  // namespace
}  // namespace kvforge
