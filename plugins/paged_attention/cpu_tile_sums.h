// Sums over blocks of keys put together, for AMX's tiles: sixteen rows at once. Everything here has internal linkage (see
// cpu_bf16.h).
#pragma once

#include "paged_attention/cpu_bf16.h"

namespace kvforge {
namespace {

// 2^x for x <= 0, to about one unit in the last place; 0 of minus infinity.
inline __m512 exp2_of_difference(__m512 x) {
  const __mmask16 finite = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-__builtin_inff()), _CMP_GT_OQ);
  const __m512 f = _mm512_maskz_reduce_ps(finite, x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // in [0, 1)
  __m512 p = _mm512_set1_ps(2.16138082e-4f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.24673764e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.67553263e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.54852202e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.40229325e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.93147042e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  return _mm512_maskz_scalef_ps(finite, p, x);
}

// Tops and sums of weights of sixteen rows over the blocks so far. Blocks are added one by one in the order of the keys:
// so a row has the same bits whatever way its blocks come here.
struct SixteenRows {
  __m512 tops = _mm512_set1_ps(-__builtin_inff()), totals = _mm512_setzero_ps();
  alignas(64) float shrink[16], grow[16];  // factors of the sums so far and of the block's

  // Rows that see none of the block's keys have a total of 0.
  void add(__m512 top, __m512 total) {
    const __mmask16 sees = _mm512_cmp_ps_mask(total, _mm512_setzero_ps(), _CMP_NEQ_UQ);
    const __m512 highest = _mm512_mask_max_ps(tops, sees, tops, top);
    const __m512 down = _mm512_mask_mov_ps(_mm512_set1_ps(1.0f), sees, exp2_of_difference(_mm512_maskz_sub_ps(sees, tops, highest)));
    const __m512 up = _mm512_maskz_mov_ps(sees, exp2_of_difference(_mm512_maskz_sub_ps(sees, top, highest)));
    tops = highest;
    totals = _mm512_fmadd_ps(total, up, _mm512_mul_ps(totals, down));
    _mm512_store_ps(shrink, down);
    _mm512_store_ps(grow, up);
  }

  // sums[dim] of row r after add(): `block`'s are added, 16 at a time, `stride` apart.
  void add_sums(int64_t r, float* sums, const float* block, int64_t stride, int64_t dim) const {
    const __m512 down = _mm512_set1_ps(shrink[r]), up = _mm512_set1_ps(grow[r]);
    for (int64_t d = 0; d < dim; d += 16, block += stride)
      _mm512_storeu_ps(sums + d,
                       _mm512_fmadd_ps(_mm512_loadu_ps(block), up, _mm512_mul_ps(_mm512_loadu_ps(sums + d), down)));
  }
};

// Puts rows together whose keys were split into blocks.
inline void merge_rows(const AttentionArgs& args, const Rows& rows, int64_t splits) {
  const int64_t count = num_rows(rows), dim = args.head_dim, stride = dim + 2;
  for (int64_t from = 0; from < count; from += 16) {
    const int64_t some = smaller(count - from, 16);
    SixteenRows sixteen;
    float sums[16 * kMaxHeadDim];
    std::memset(sums, 0, some * dim * sizeof(float));
    for (int64_t s = 0; s < splits; ++s) {
      const float* const part = rows.partial + (s * count + from) * stride;
      alignas(64) float tops[16] = {}, totals[16] = {};
      for (int64_t r = 0; r < some; ++r) tops[r] = part[r * stride + dim], totals[r] = part[r * stride + dim + 1];
      sixteen.add(_mm512_load_ps(tops), _mm512_load_ps(totals));
      for (int64_t r = 0; r < some; ++r) sixteen.add_sums(r, sums + r * dim, part + r * stride, 16, dim);
    }
    alignas(64) float tops[16], totals[16];
    _mm512_store_ps(tops, sixteen.tops);
    _mm512_store_ps(totals, sixteen.totals);
    for (int64_t r = 0; r < some; ++r)
      finish_row(args, rows, rows.row_begin + from + r, sums + r * dim, tops[r], totals[r], nullptr);
  }
}

}  // namespace
}  // namespace kvforge
