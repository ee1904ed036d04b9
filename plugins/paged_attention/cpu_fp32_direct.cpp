// The direct part of the float32 kernel: with few rows per key, keys are read once, in memory order, and packed a slab at a
// time into the L1 cache. See cpu_fp32.h.
#include "paged_attention/cpu_fp32.h"
#include "paged_attention/cpu_fp32_gemm.h"
#include "paged_attention/cpu_fp32_load.h"

namespace kvforge {
namespace {

constexpr int64_t kSlab = 32;  // keys of which all heads are worked on in turn, a multiple of kLanes

}  // namespace

namespace KVFORGE_ISA {

int64_t fp32_direct_scratch_bytes(const AttentionArgs& a, int64_t rows) {
  const int64_t floats = rows * (a.head_dim + kKeyBlock + padded_dim(a) + 2) + kSlab * padded_dim(a);
  return floats * static_cast<int64_t>(sizeof(float));
}

void fp32_direct(const AttentionArgs& a, const DirectWork& work, const DirectWork*, char* scratch) {
  const auto [heads, count, begin, end, split] = work;
  const int64_t rows = num_rows(heads[0]), all = rows * count, dim = padded_dim(a);
  const int64_t base = begin / kSlab * kSlab, keys = round_up(end - base, kSlab);
  const float factor = a.scale * a.k_scale;
  float* q = reinterpret_cast<float*>(scratch);
  float* weights = q + all * a.head_dim;  // scores at first
  float* sums = weights + all * kKeyBlock;
  float* packed = sums + all * dim;
  float* top = packed + kSlab * dim;
  float* total = top + all;

  const KeyRows k(a, a.k, heads[0], begin, end), v(a, a.v, heads[0], begin, end);
  for (int64_t h = 0; h < count; ++h) load_queries(a, heads[h], q + h * rows * a.head_dim);
  for (int64_t slab = 0; slab < keys; slab += kSlab)
    for (int64_t h = 0; h < count; ++h) {
      if (slab + kSlab < keys) k.fetch(base + slab + kSlab, base + slab + 2 * kSlab, heads[h].kv_head);
      else v.fetch(base, base + kSlab, heads[h].kv_head);
      k.transpose(base + slab, kSlab, heads[h].kv_head, a.head_dim, packed, kSlab);
      gemm(rows, kSlab, a.head_dim, q + h * rows * a.head_dim, a.head_dim, packed, kSlab,
           weights + h * rows * kKeyBlock + slab, kKeyBlock, false);
    }

  float key_scales[kScaleFloats];
  BlockScales scales;
  for (int64_t r = 0; r < all; ++r) {
    const Rows& head = heads[r / rows];
    if (r % rows == 0) scales = gather_scales(a, head, base, begin, end, key_scales);
    float* row = weights + r * kKeyBlock;
    int64_t first, last;
    visible_keys(a, position(a, head, head.row_begin + r % rows), begin, end, &first, &last);
    top[r] = -__builtin_inff();
    total[r] = 0;
    if (first < last)
      total[r] = fp32_softmax_row(row, keys, first - base, last - base, factor, scales.k, scales.v, &top[r]);
    else
      std::memset(row, 0, keys * sizeof(float));
  }

  for (int64_t slab = 0; slab < keys; slab += kSlab)
    for (int64_t h = 0; h < count; ++h) {
      if (slab + kSlab < keys) v.fetch(base + slab + kSlab, base + slab + 2 * kSlab, heads[h].kv_head);
      v.load(base + slab, base + slab + kSlab, heads[h].kv_head, a.head_dim, dim, packed);
      gemm(rows, dim, kSlab, weights + h * rows * kKeyBlock + slab, kKeyBlock, packed, dim, sums + h * rows * dim, dim,
           slab > 0);
    }

  for (int64_t r = 0; r < all; ++r) {
    const Rows& head = heads[r / rows];
    float* partial = head.partial == nullptr ? nullptr : head.partial + split * rows * (a.head_dim + 2);
    fp32_finish_row(a, head, head.row_begin + r % rows, {sums + r * dim, top[r], total[r]}, partial);
  }
}

}  // namespace KVFORGE_ISA
}  // namespace kvforge
