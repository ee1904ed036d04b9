// The scales of 8-bit keys and values, by block: everything here has internal linkage (see cpu_rows.h).
#pragma once

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include <cstring>

#include "paged_attention/cpu_rows.h"

namespace kvforge {
namespace {

// Scales of the keys of a block, or nulls where all keys have the same: K's multiply scores, V's weights.
struct BlockScales {
  const float* k = nullptr;
  const float* v = nullptr;
};

#if defined(__AVX512F__)
// 16 floats `stride` apart, a power of two up to 8, from place `at` of the first `stride` on.
inline __m512 strided(const float* from, int64_t stride, int64_t at) {
  if (stride == 1) return _mm512_loadu_ps(from);
  const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  __m512 x[8];
  for (int64_t i = 0; i < stride; ++i) x[i] = _mm512_loadu_ps(from + 16 * i);
  for (; stride > 1; stride /= 2, at /= 2) {
    const __m512i chosen = _mm512_add_epi32(even, _mm512_set1_epi32(static_cast<int>(at & 1)));
    for (int64_t i = 0; i < stride / 2; ++i) x[i] = _mm512_permutex2var_ps(x[2 * i], chosen, x[2 * i + 1]);
  }
  return x[0];
}
#endif

// Scales of a KV head for keys [first, last), page by page: within one they are a fixed number of floats apart.
inline void gather_scales(const AttentionArgs& a, const PagedTensor& scales, const Rows& rows, int64_t first, int64_t last,
                          float* out) {
  const float* const data = static_cast<const float*>(scales.data) + rows.kv_head * scales.head_stride;
  const int64_t stride = scales.slot_stride;
#if defined(__AVX512F__)
  const bool in_vectors = scales.head_stride == 1 && rows.kv_head < stride && stride <= 8 && (stride & (stride - 1)) == 0;
#endif
  for (int64_t key = first; key < last;) {
    const int64_t page = key / a.page_size, slot = key - page * a.page_size;
    const int64_t count = smaller(last - key, a.page_size - slot);
    const float* from = data + rows.pages[page] * scales.page_stride + slot * stride;
    int64_t i = 0;
#if defined(__AVX512F__)
    if (in_vectors)
      for (; i + 16 <= count; i += 16, from += 16 * stride, out += 16)
        _mm512_storeu_ps(out, strided(from - rows.kv_head, stride, rows.kv_head));
#endif
    for (; i < count; ++i, from += stride) *out++ = *from;
    key += count;
  }
}

// Scales of keys [first, last) of the block that starts at `begin`, zeros for its others: out is [2, kKeyBlock],
// K's and V's.
inline BlockScales gather_scales(const AttentionArgs& a, const Rows& rows, int64_t begin, int64_t first, int64_t last,
                                 float* out) {
  if (a.k_scales.data == nullptr) return {};
  if (last - first < kKeyBlock) std::memset(out, 0, 2 * kKeyBlock * sizeof(float));
  gather_scales(a, a.k_scales, rows, first, last, out + first - begin);
  gather_scales(a, a.v_scales, rows, first, last, out + kKeyBlock + first - begin);
  return {out, out + kKeyBlock};
}

}  // namespace
}  // namespace kvforge
