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

// Scales of keys [first, last) of the block that starts at `begin`, zeros for its others: out is [2, kKeyBlock],
// K's and V's.
inline BlockScales gather_scales(const AttentionArgs& a, const Rows& rows, int64_t begin, int64_t first, int64_t last,
                                 float* out) {
  if (a.k_scales.data == nullptr) return {};
  const KeyScales k(a, a.k_scales, a.k_scale, rows.pages, first, last);
  const KeyScales v(a, a.v_scales, a.v_scale, rows.pages, first, last);
  std::memset(out, 0, 2 * kKeyBlock * sizeof(float));
  for (int64_t key = first; key < last; ++key) {
    out[key - begin] = k(key - first, rows.kv_head);
    out[kKeyBlock + key - begin] = v(key - first, rows.kv_head);
  }
  return {out, out + kKeyBlock};
}

}  // namespace
}  // namespace kvforge
