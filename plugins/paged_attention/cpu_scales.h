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

constexpr int64_t kScaleFloats = 2 * kKeyBlock;  // of a block, K's and V's

#if defined(__AVX512F__)
// Sixteen floats, `Stride` apart; nothing behind the last of them is read.
template <int Stride>
inline __m512 take_sixteen(const float* from) {
  const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  __m512 x[Stride];
#pragma GCC unroll 8
  for (int i = 0; i + 1 < Stride; ++i) x[i] = _mm512_loadu_ps(from + 16 * i);
  x[Stride - 1] = _mm512_maskz_loadu_ps(static_cast<__mmask16>(0xffff >> (Stride - 1)), from + 16 * (Stride - 1));
#pragma GCC unroll 3
  for (int n = Stride; n > 1; n /= 2)
#pragma GCC unroll 4
    for (int i = 0; i < n / 2; ++i) x[i] = _mm512_permutex2var_ps(x[2 * i], even, x[2 * i + 1]);
  return x[0];
}
#endif

// `count` floats, `stride` apart.
inline void take_strided(const float* from, int64_t count, int64_t stride, float* out) {
  int64_t i = 0;
#if defined(__AVX512F__)
  const auto sixteens = [&](auto take) {
    for (; i + 16 <= count; i += 16) _mm512_storeu_ps(out + i, take(from + i * stride));
  };
  if (stride == 1) sixteens(take_sixteen<1>);
  else if (stride == 2) sixteens(take_sixteen<2>);
  else if (stride == 4) sixteens(take_sixteen<4>);
  else if (stride == 8) sixteens(take_sixteen<8>);
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
