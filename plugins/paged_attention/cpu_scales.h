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

constexpr int64_t kScaleFloats = 2 * kKeyBlock + 16;  // of a block, K's and V's; the last may be written over

// `count` floats, `stride` apart: up to 15 zeros are written behind them.
inline void take_strided(const float* from, int64_t count, int64_t stride, float* out) {
  int64_t i = 0;
#if defined(__AVX512F__)
  if (stride <= 8 && 16 % stride == 0) {
    uint32_t lanes = 0;
    for (int64_t lane = 0; lane < 16; lane += stride) lanes |= uint32_t{1} << lane;
    const int64_t step = 16 / stride;
    // The last floats that are read lie before the next scale of this head.
    for (; i + step < count; i += step)
      _mm512_storeu_ps(
          out + i, _mm512_maskz_compress_ps(static_cast<__mmask16>(lanes), _mm512_loadu_ps(from + i * stride)));
  }
#endif
  for (; i < count; ++i) out[i] = from[i * stride];
}

// Scales of a KV head for keys [first, last), page by page: within one they are a fixed number of floats apart.
inline void gather_scales(const AttentionArgs& a, const PagedTensor& scales, const Rows& rows, int64_t first, int64_t last,
                          float* out) {
  const float* const data = static_cast<const float*>(scales.data) + rows.kv_head * scales.head_stride;
  for (int64_t key = first; key < last;) {
    const int64_t page = key / a.page_size, slot = key - page * a.page_size;
    const int64_t count = smaller(last - key, a.page_size - slot);
    take_strided(data + rows.pages[page] * scales.page_stride + slot * scales.slot_stride, count, scales.slot_stride, out);
    out += count;
    key += count;
  }
}

// Scales of keys [first, last) of the block that starts at `begin`, zeros for its others: out is [2, kKeyBlock],
// K's and V's, in kScaleFloats.
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
