// The scales of 8-bit keys and values, by block: everything here has internal linkage (see cpu_rows.h).
#pragma once

#include <cstring>

#include "paged_attention/cpu_rows.h"

namespace kvforge {
namespace {

// Scales of the keys of a block, or nulls where all keys have the same: K's multiply scores, V's weights.
struct BlockScales {
  const float* k = nullptr;
  const float* v = nullptr;
};

// Scales of a KV head for keys [first, last), page by page: within one they are a fixed number of floats apart.
inline void gather_scales(const AttentionArgs& a, const PagedTensor& scales, const Rows& rows, int64_t first, int64_t last,
                          float* out) {
  const float* const data = static_cast<const float*>(scales.data) + rows.kv_head * scales.head_stride;
  for (int64_t key = first; key < last;) {
    const int64_t page = key / a.page_size, slot = key - page * a.page_size;
    const int64_t count = smaller(last - key, a.page_size - slot);
    const float* from = data + rows.pages[page] * scales.page_stride + slot * scales.slot_stride;
    for (int64_t i = 0; i < count; ++i, from += scales.slot_stride) *out++ = *from;
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
