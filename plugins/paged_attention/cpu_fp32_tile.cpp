// The tiles of the float32 kernel: K is packed with its keys in the lanes, V as it is. See cpu_fp32.h.
#include "paged_attention/cpu_fp32.h"
#include "paged_attention/cpu_fp32_gemm.h"
#include "paged_attention/cpu_fp32_load.h"

namespace kvforge {
namespace {

constexpr int64_t kStrip = 16;  // rows of a tile that are worked on at once

void pack_block(const AttentionArgs& a, const Rows& rows, int64_t begin, float* k_out, float* v_out) {
  const int64_t first = larger(begin, rows.first_key), last = smaller(begin + kKeyBlock, rows.end_key);
  const int64_t dim = padded_dim(a);
  const KeyRows k(a, a.k, rows, first, last), v(a, a.v, rows, first, last);
  const int64_t aligned = first / kLanes * kLanes;
  k.transpose(aligned, round_up(last, kLanes) - aligned, rows.kv_head, a.head_dim, k_out + aligned - begin, kKeyBlock);
  std::memset(v_out, 0, (first - begin) * dim * sizeof(float));
  v.load(first, last, rows.kv_head, a.head_dim, dim, v_out + (first - begin) * dim);
  std::memset(v_out + (last - begin) * dim, 0, (begin + kKeyBlock - last) * dim * sizeof(float));
}

}  // namespace

namespace KVFORGE_ISA {

// Packed block: K as [head_dim, kKeyBlock], of keys that the sequence does not need anything; then V as
// [kKeyBlock, padded_dim], zeros for these.
int64_t fp32_packed_bytes(const AttentionArgs& a) {
  return kKeyBlock * (a.head_dim + padded_dim(a)) * static_cast<int64_t>(sizeof(float));
}

int64_t fp32_tile_scratch_bytes(const AttentionArgs& a) {
  const int64_t floats = kTileRows * (a.head_dim + padded_dim(a)) + kStrip * (kKeyBlock + padded_dim(a));
  return floats * static_cast<int64_t>(sizeof(float)) + fp32_packed_bytes(a);
}

void fp32_pack(const AttentionArgs& a, const Rows& rows, int64_t begin, char* packed) {
  float* k = reinterpret_cast<float*>(packed);
  pack_block(a, rows, begin, k, k + a.head_dim * kKeyBlock);
}

void fp32_tile(const AttentionArgs& a, const Rows& rows, int64_t begin, int64_t end, const char* packed, char* scratch,
               float* partial) {
  const int64_t count = num_rows(rows), dim = padded_dim(a);
  const float factor = a.scale * a.k_scale;
  float* q = reinterpret_cast<float*>(scratch);
  float* weights = q + kTileRows * a.head_dim;  // scores at first, of one strip
  float* fresh = weights + kStrip * kKeyBlock;  // sums over one block
  float* acc = fresh + kStrip * dim;
  char* own = reinterpret_cast<char*>(acc + kTileRows * dim);
  Fp32RowSums sums[kTileRows];
  load_queries(a, rows, q);
  std::memset(acc, 0, count * dim * sizeof(float));
  for (int64_t r = 0; r < count; ++r) sums[r].sums = acc + r * dim;
  for (int64_t block = begin / kKeyBlock * kKeyBlock; block < end; block += kKeyBlock) {
    if (packed == nullptr) fp32_pack(a, rows, block, own);
    const float* k = reinterpret_cast<const float*>(packed == nullptr ? own : packed);
    const float* v = k + a.head_dim * kKeyBlock;
    if (packed != nullptr) packed += fp32_packed_bytes(a);
    float key_scales[kScaleFloats];
    const BlockScales scales = gather_scales(a, rows, block, larger(block, rows.first_key),
                                             smaller(block + kKeyBlock, rows.end_key), key_scales);
    for (int64_t strip = 0; strip < count; strip += kStrip) {
      const int64_t stop = smaller(strip + kStrip, count), strip_rows = stop - strip;
      // The strip's last row sees the most keys; the strip's work ends where these end.
      const int64_t seen = smaller(smaller(end, block + kKeyBlock), position(a, rows, rows.row_begin + stop - 1) + 1);
      if (seen <= block) continue;
      const int64_t width = round_up(seen - block, kLanes);
      gemm(strip_rows, width, a.head_dim, q + strip * a.head_dim, a.head_dim, k, kKeyBlock, weights, kKeyBlock, false);
      float top[kStrip] = {}, total[kStrip] = {};
      for (int64_t r = 0; r < strip_rows; ++r) {
        float* row = weights + r * kKeyBlock;
        int64_t first, last;
        visible_keys(a, position(a, rows, rows.row_begin + strip + r), larger(begin, block), seen, &first, &last);
        if (first < last)
          total[r] = fp32_softmax_row(row, width, first - block, last - block, factor, scales.k, scales.v, &top[r]);
        else
          std::memset(row, 0, width * sizeof(float));
      }
      gemm(strip_rows, dim, width, weights, kKeyBlock, v, dim, fresh, dim, false);
      for (int64_t r = 0; r < strip_rows; ++r)
        fp32_add_block(sums[strip + r], fresh + r * dim, top[r], total[r], dim);
    }
  }
  for (int64_t r = 0; r < count; ++r) fp32_finish_row(a, rows, rows.row_begin + r, sums[r], partial);
}

}  // namespace KVFORGE_ISA
}  // namespace kvforge
