// The kernel for bfloat16 queries and pools by AMX's tiles (native/tiles.h). A row has the same bits from tile(), which is
// here, and from direct(): a score is summed in steps of 32 dimensions, a weighted value over a key block in steps of 32
// keys, whichever of the two operands lies in the rows of the tiles; softmax and blocks are those of the AVX512-BF16 kernel
// (cpu_bf16.h). Compiled into namespace KVFORGE_ISA, so no inline function with external linkage may be used here.
#include "paged_attention/cpu_tiles.h"

namespace kvforge {
namespace {

constexpr int64_t kStrip = 32;  // rows of a tile() that are worked on at once, two tiles of them
constexpr int64_t kTilesOfBlock = kKeyBlock / kRowsOfTile;

inline __m512i interleave(__m512i even, __m512i odd) { return _mm512_permutex2var_epi16(even, pairs_low(), odd); }

// Packed block: K as [16 keys' tile, step], then V as [16 dimensions' tile, 32 keys' step], each a right operand.
int64_t k_bytes(const AttentionArgs& a) { return kTilesOfBlock * num_steps(a) * kTileBytes; }
int64_t v_bytes(const AttentionArgs& a) { return kKeyBlock * a.head_dim * 2; }
int64_t packed_bytes(const AttentionArgs& a) { return k_bytes(a) + v_bytes(a); }

template <typename Pool>
void pack_block(const AttentionArgs& a, const Rows& rows, int64_t begin, char* k_out, char* v_out) {
  const int64_t first = larger(begin, rows.first_key), last = smaller(begin + kKeyBlock, rows.end_key);
  int64_t k_offset[kKeyBlock], v_offset[kKeyBlock];
  key_offsets(a, a.k, rows.pages, first, last, k_offset);
  key_offsets(a, a.v, rows.pages, first, last, v_offset);
  const Pool* k = static_cast<const Pool*>(a.k.data) + rows.kv_head * a.k.head_stride;
  const Pool* v = static_cast<const Pool*>(a.v.data) + rows.kv_head * a.v.head_stride;
  const auto needed = [&](int64_t key) { return key >= first && key < last; };
  const int64_t steps = num_steps(a);
  for (int64_t key = begin; key < begin + kKeyBlock; key += 16)
    for (int64_t s = 0; s < steps; ++s, k_out += kTileBytes) {
      if (key >= last) {
        std::memset(k_out, 0, kTileBytes);
        continue;
      }
      __m512i x[16];
      for (int i = 0; i < 16; ++i)
        x[i] = needed(key + i) ? load_masked(step_mask(a, s), advance(k + k_offset[key + i - first], s * kStep))
                               : _mm512_setzero_si512();
      store_transposed(x, k_out);
    }
  for (int64_t key = begin; key < begin + kKeyBlock; key += 2) {
    char* out = v_out + (key - begin) / kStep * kTileBytes + (key - begin) % kStep / 2 * kTileRowBytes;
    for (int64_t d = 0; d < a.head_dim; d += 16, out += kKeyBlock / kStep * kTileBytes) {
      const __m512i even = needed(key) ? load_masked(0xffff, advance(v + v_offset[key - first], d)) : _mm512_setzero_si512();
      const __m512i odd =
          needed(key + 1) ? load_masked(0xffff, advance(v + v_offset[key + 1 - first], d)) : _mm512_setzero_si512();
      _mm512_storeu_si512(out, interleave(even, odd));
    }
  }
}

void pack(const AttentionArgs& a, const Rows& rows, int64_t begin, char* packed) {
  with_pool(a, [&](auto pool) { pack_block<decltype(pool)>(a, rows, begin, packed, packed + k_bytes(a)); });
}

// c[32 rows, 32] = a b: two tiles of rows by two of columns, over `steps` tiles of the depth.
inline void multiply(const char* a, int64_t a_row, int64_t a_below, int64_t a_step, const char* b, int64_t b_beside,
                     int64_t steps, char* c, int64_t c_row) {
  tile_zero<0>();
  tile_zero<1>();
  tile_zero<2>();
  tile_zero<3>();
  for (int64_t s = 0; s < steps; ++s, a += a_step, b += kTileBytes) {
    tile_load<4>(a, a_row);
    tile_load<6>(b, kTileRowBytes);
    tile_load<7>(b + b_beside, kTileRowBytes);
    tile_load<5>(a + a_below, a_row);
    tile_dot_bf16<0, 4, 6>();
    tile_dot_bf16<1, 4, 7>();
    tile_dot_bf16<2, 5, 6>();
    tile_dot_bf16<3, 5, 7>();
  }
  tile_store<0>(c, c_row);
  tile_store<1>(c + kTileRowBytes, c_row);
  tile_store<2>(c + kRowsOfTile * c_row, c_row);
  tile_store<3>(c + kRowsOfTile * c_row + kTileRowBytes, c_row);
}

// The same by one tile of columns.
inline void multiply_narrow(const char* a, int64_t a_row, int64_t a_below, int64_t a_step, const char* b,
                            int64_t steps, char* c, int64_t c_row) {
  tile_zero<0>();
  tile_zero<2>();
  for (int64_t s = 0; s < steps; ++s, a += a_step, b += kTileBytes) {
    tile_load<4>(a, a_row);
    tile_load<6>(b, kTileRowBytes);
    tile_load<5>(a + a_below, a_row);
    tile_dot_bf16<0, 4, 6>();
    tile_dot_bf16<2, 5, 6>();
  }
  tile_store<0>(c, c_row);
  tile_store<2>(c + kRowsOfTile * c_row, c_row);
}

// Lane r of the result is op over the lanes of vectors[r], in the order of _mm512_reduce_add_ps.
template <typename Op>
inline __m512 reduce_rows(const __m512* vectors, const Op& op) {
  __m512i words[16];
  for (int r = 0; r < 16; ++r) words[r] = reinterpret_cast<__m512i>(vectors[r]);
  transpose(words);
  __m512 x[16];
  for (int i = 0; i < 16; ++i) x[i] = reinterpret_cast<__m512>(words[i]);
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) x[i] = op(x[i], x[i + half]);
  return x[0];
}

// Raises the highest of each row's scores, lane by lane, by those of 32 keys; `scales`: of these keys, or null.
inline void update_highest(const char* scores, const float* scales, __m512* highest) {
  if (scales == nullptr) {
#pragma GCC unroll 4
    for (int64_t r = 0; r < kStrip; ++r, scores += kScoreRow)
      highest[r] = _mm512_max_ps(highest[r], _mm512_max_ps(_mm512_loadu_ps(scores), _mm512_loadu_ps(scores + 64)));
    return;
  }
  const __m512 low = _mm512_loadu_ps(scales), high = _mm512_loadu_ps(scales + 16);
#pragma GCC unroll 4
  for (int64_t r = 0; r < kStrip; ++r, scores += kScoreRow) {
    const __m512 first = _mm512_mul_ps(_mm512_loadu_ps(scores), low);
    highest[r] = _mm512_max_ps(highest[r], _mm512_max_ps(first, _mm512_mul_ps(_mm512_loadu_ps(scores + 64), high)));
  }
}

// softmax_row() of 16 rows that see all keys of a block, with the same bits: a row's two sums across lanes wait for one
// another, those of 16 rows do not. factor >= 0.
template <bool Scaled>
void softmax_rows(const char* scores, const __m512* highest, char* weights, float factor, const BlockScales& scales,
                  float* tops, float* totals) {
  const __m512 scale = _mm512_set1_ps(factor);
  // Rounding keeps the order: the largest score times the factor is the largest product.
  const auto larger_of = [](__m512 x, __m512 y) { return _mm512_max_ps(x, y); };
  _mm512_storeu_ps(tops, _mm512_mul_ps(reduce_rows(highest, larger_of), scale));
  __m512 sums[16];
  for (int64_t r = 0; r < 16; ++r) {
    const float* row = reinterpret_cast<const float*>(scores + r * kScoreRow);
    char* const out = weights + r * kWeightRow;
    const __m512 peak = _mm512_set1_ps(tops[r]);
    __m512 total = _mm512_setzero_ps();
#pragma GCC unroll 4
    for (int64_t j = 0; j < kKeyBlock; j += 32) {
      const auto weight = [&](int64_t at) {
        const __m512 score = _mm512_loadu_ps(row + at);
        return weight_of(Scaled ? _mm512_mul_ps(score, _mm512_loadu_ps(scales.k + at)) : score, scale, peak);
      };
      __m512 low = weight(j), high = weight(j + 16);
      total = _mm512_add_ps(_mm512_add_ps(total, low), high);
      if (Scaled) {
        low = _mm512_mul_ps(low, _mm512_loadu_ps(scales.v + j));
        high = _mm512_mul_ps(high, _mm512_loadu_ps(scales.v + j + 16));
      }
      _mm512_storeu_si512(out + j * 2, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low)));
    }
    sums[r] = total;
  }
  _mm512_storeu_ps(totals, reduce_rows(sums, [](__m512 x, __m512 y) { return _mm512_add_ps(x, y); }));
}

// Rows [begin, end) of a tile over keys [first_key, end_key) of the block of keys that starts at `block`.
struct Strip {
  int64_t begin, end, block, first_key, end_key;
  int64_t seen, width;  // keys before `seen` count for some row; those of the block that are multiplied
};

// Whether all rows of a whole strip see all keys of a whole block. The first row sees the fewest of the later keys, the
// last one those of a window from the latest on.
bool sees_all(const AttentionArgs& a, const Rows& rows, const Strip& s) {
  return s.end - s.begin == kStrip && s.block >= s.first_key && s.block + kKeyBlock <= s.end_key &&
      a.scale * a.k_scale >= 0 && position(a, rows, rows.row_begin + s.begin) >= s.block + kKeyBlock - 1 &&
      (a.window == 0 || position(a, rows, rows.row_begin + s.end - 1) - a.window < s.block);
}

void softmax_strip(const AttentionArgs& a, const Rows& rows, const Strip& s, const BlockScales& scales,
                   const char* scores, char* weights, float* tops, float* totals) {
  for (int64_t r = 0; r < kStrip; ++r) {
    bf16* row = reinterpret_cast<bf16*>(weights + r * kWeightRow);
    int64_t first = 0, last = 0;
    if (s.begin + r < s.end)
      visible_keys(a, position(a, rows, rows.row_begin + s.begin + r), larger(s.first_key, s.block), s.seen, &first,
                   &last);
    if (first >= last) {
      std::memset(row, 0, s.width * sizeof(bf16));
      continue;
    }
    tops[r] = -__builtin_inff();
    totals[r] = softmax_row(a, reinterpret_cast<const float*>(scores + r * kScoreRow), row, s.width, first - s.block,
                            last - s.block, scales, tops + r);
  }
}

int64_t tile_scratch_bytes(const AttentionArgs& a) {
  return kTileRows * (num_steps(a) * kTileRowBytes + a.head_dim * 4) +
      kStrip * (kScoreRow + kWeightRow + a.head_dim * 4) + packed_bytes(a);
}

void tile(const AttentionArgs& a, const Rows& rows, int64_t begin, int64_t end, const char* packed, char* scratch,
          float* partial) {
  const int64_t count = num_rows(rows), padded = round_up(count, kStrip), dim = a.head_dim, steps = num_steps(a);
  char* const scores = scratch;  // of one strip
  char* const weights = scores + kStrip * kScoreRow;
  float* const fresh = reinterpret_cast<float*>(weights + kStrip * kWeightRow);  // sums over one block
  float* const acc = fresh + kStrip * dim;
  char* const q = reinterpret_cast<char*>(acc + kTileRows * dim);  // [16 rows' tile, step]
  char* const own = q + kTileRows * steps * kTileRowBytes;
  RowSums sums[kTileRows];
  for (int64_t r = 0; r < padded; ++r)
    for (int64_t s = 0; s < steps; ++s) {
      char* place = q + (r / kRowsOfTile * steps + s) * kTileBytes + r % kRowsOfTile * kTileRowBytes;
      __m512i x = _mm512_setzero_si512();
      if (r < count) {
        const bf16* from = static_cast<const bf16*>(a.q) + query_offset(a, rows, rows.row_begin + r);
        x = load_masked(step_mask(a, s), from + s * kStep);
      }
      _mm512_storeu_si512(place, x);
    }
  for (int64_t r = 0; r < count; ++r) sums[r].sums = acc + r * dim;
  std::memset(acc, 0, padded * dim * sizeof(float));
  configure_tiles();
  for (int64_t block = begin / kKeyBlock * kKeyBlock; block < end; block += kKeyBlock) {
    if (packed == nullptr) pack(a, rows, block, own);
    const char* k = packed == nullptr ? own : packed;
    const char* v = k + k_bytes(a);
    if (packed != nullptr) packed += packed_bytes(a);
    float key_scales[kScaleFloats];
    const BlockScales scales = gather_scales(a, rows, block, larger(block, rows.first_key),
                                             smaller(block + kKeyBlock, rows.end_key), key_scales);
    for (int64_t strip = 0; strip < count; strip += kStrip) {
      const int64_t stop = smaller(strip + kStrip, count);
      // The strip's last row sees the most keys; the strip's work ends where these end.
      const int64_t seen = smaller(smaller(end, block + kKeyBlock), position(a, rows, rows.row_begin + stop - 1) + 1);
      if (seen <= block) continue;
      const int64_t width = round_up(seen - block, kStep);
      const Strip s{strip, stop, block, begin, end, seen, width};
      const bool all_seen = sees_all(a, rows, s);
      __m512 highest[kStrip];
      for (__m512& h : highest) h = _mm512_set1_ps(-__builtin_inff());
      const auto raise = [&](int64_t j) {
        update_highest(scores + j * 4, scales.k == nullptr ? nullptr : scales.k + j, highest);
      };
      for (int64_t j = 0; j < width; j += 32) {
        multiply(q + strip / kRowsOfTile * steps * kTileBytes, kTileRowBytes, steps * kTileBytes, kTileBytes,
                 k + j / kRowsOfTile * steps * kTileBytes, steps * kTileBytes, steps, scores + j * 4, kScoreRow);
        // By the product before, which is in memory while tiles compute this one.
        if (all_seen && j > 0) raise(j - 32);
      }
      float top[kStrip], total[kStrip] = {};
      if (all_seen) {
        raise(kKeyBlock - 32);
        const auto softmax = scales.k == nullptr ? softmax_rows<false> : softmax_rows<true>;
        for (int64_t r = 0; r < kStrip; r += kRowsOfTile)
          softmax(scores + r * kScoreRow, highest + r, weights + r * kWeightRow, a.scale * a.k_scale * kLog2E, scales,
                  top + r, total + r);
      } else {
        softmax_strip(a, rows, s, scales, scores, weights, top, total);
      }
      constexpr int64_t kColumn = kKeyBlock / kStep * kTileBytes;  // 16 dimensions of a packed block's values
      int64_t d = 0;
      for (; d + 32 <= dim; d += 32)
        multiply(weights, kWeightRow, kRowsOfTile * kWeightRow, kStep * 2, v + d / 16 * kColumn, kColumn, width / kStep,
                 reinterpret_cast<char*>(fresh + d), dim * 4);
      if (d < dim)
        multiply_narrow(weights, kWeightRow, kRowsOfTile * kWeightRow, kStep * 2, v + d / 16 * kColumn, width / kStep,
                        reinterpret_cast<char*>(fresh + d), dim * 4);
      for (int64_t r = strip; r < stop; ++r)
        add_block(sums[r], fresh + (r - strip) * dim, top[r - strip], total[r - strip], dim);
    }
  }
  release_tiles();
  for (int64_t r = 0; r < count; ++r)
    finish_row(a, rows, rows.row_begin + r, sums[r].sums, sums[r].top, sums[r].total, partial);
}

int64_t scratch_bytes(const AttentionArgs& a, int64_t) {
  return larger(tile_scratch_bytes(a), KVFORGE_ISA::tiles_direct_scratch_bytes(a));
}

}  // namespace

namespace KVFORGE_ISA {

extern const AttentionKernel bf16_kernel = {
    packed_bytes, scratch_bytes, pack, tile, tiles_direct, merge_blocks, true, kRowsOfTile};

}  // namespace KVFORGE_ISA
}  // namespace kvforge
