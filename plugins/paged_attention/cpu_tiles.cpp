// The kernel for bfloat16 queries and pools by AMX's tiles (native/tiles.h). A row has the same bits from tile() and from
// direct(): a score is summed in steps of 32 dimensions, a weighted value over a key block in steps of 32 keys, whichever
// of the two operands lies in the rows of the tiles; softmax and blocks are those of the AVX512-BF16 kernel (cpu_bf16.h).
// Compiled into namespace KVFORGE_ISA, so no inline function with external linkage may be used here.
#include <type_traits>

#include "native/tiles.h"
#include "paged_attention/cpu_bf16_load.h"
#include "paged_attention/cpu_transpose.h"

namespace kvforge {
namespace {

constexpr int64_t kStep = 32;   // dimensions or keys of a product of tiles
constexpr int64_t kStrip = 32;  // rows of a tile() that are worked on at once, two tiles of them
constexpr int64_t kSlab = 32;   // keys of which all heads are worked on in turn
constexpr int64_t kTilesOfBlock = kKeyBlock / kRowsOfTile;
// Bytes from row to row: an odd number of cache lines, so that the rows of a tile lie in different sets of the cache.
constexpr int64_t kScoreRow = (kKeyBlock + 16) * 4;
constexpr int64_t kWeightRow = (kKeyBlock + 32) * 2;
constexpr int64_t kBytesAhead = 24 << 10;  // by which a piece of direct() is fetched ahead of its use

int64_t num_steps(const AttentionArgs& a) { return (a.head_dim + kStep - 1) / kStep; }

__mmask32 step_mask(const AttentionArgs& a, int64_t step) {
  return a.head_dim - step * kStep >= kStep ? 0xffffffffu : 0xffffu;  // head_dim is a multiple of 16
}

// 16 vectors of 32 elements, as rows, become the right operand of a product: pairs of elements by vector.
inline void store_transposed(__m512i x[16], char* tile) {
  transpose(x);
  for (int i = 0; i < 16; ++i) _mm512_storeu_si512(tile + i * kTileRowBytes, x[i]);
}

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
        x[i] = needed(key + i) ? load_masked(step_mask(a, s), k + k_offset[key + i - first] + s * kStep)
                               : _mm512_setzero_si512();
      store_transposed(x, k_out);
    }
  for (int64_t key = begin; key < begin + kKeyBlock; key += 2) {
    char* out = v_out + (key - begin) / kStep * kTileBytes + (key - begin) % kStep / 2 * kTileRowBytes;
    for (int64_t d = 0; d < a.head_dim; d += 16, out += kKeyBlock / kStep * kTileBytes) {
      const __m512i even = needed(key) ? load_masked(0xffff, v + v_offset[key - first] + d) : _mm512_setzero_si512();
      const __m512i odd =
          needed(key + 1) ? load_masked(0xffff, v + v_offset[key + 1 - first] + d) : _mm512_setzero_si512();
      _mm512_storeu_si512(out, interleave(even, odd));
    }
  }
}

void pack(const AttentionArgs& a, const Rows& rows, int64_t begin, char* packed) {
  char* const v = packed + k_bytes(a);
  if (a.pool == Dtype::bfloat16) pack_block<bf16>(a, rows, begin, packed, v);
  else if (a.pool == Dtype::fp8) pack_block<fp8>(a, rows, begin, packed, v);
  else pack_block<int8_t>(a, rows, begin, packed, v);
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
    float key_scales[2 * kKeyBlock];
    const BlockScales scales = gather_scales(a, rows, block, larger(block, rows.first_key),
                                             smaller(block + kKeyBlock, rows.end_key), key_scales);
    for (int64_t strip = 0; strip < count; strip += kStrip) {
      const int64_t stop = smaller(strip + kStrip, count);
      // The strip's last row sees the most keys; the strip's work ends where these end.
      const int64_t seen = smaller(smaller(end, block + kKeyBlock), position(a, rows, rows.row_begin + stop - 1) + 1);
      if (seen <= block) continue;
      const int64_t width = round_up(seen - block, kStep);
      for (int64_t j = 0; j < width; j += 32)
        multiply(q + strip / kRowsOfTile * steps * kTileBytes, kTileRowBytes, steps * kTileBytes, kTileBytes,
                 k + j / kRowsOfTile * steps * kTileBytes, steps * kTileBytes, steps, scores + j * 4, kScoreRow);
      float top[kStrip], total[kStrip] = {};
      for (int64_t r = strip; r < strip + kStrip; ++r) {
        bf16* row = reinterpret_cast<bf16*>(weights + (r - strip) * kWeightRow);
        int64_t first = 0, last = 0;
        if (r < stop)
          visible_keys(a, position(a, rows, rows.row_begin + r), larger(begin, block), seen, &first, &last);
        if (first >= last) {
          std::memset(row, 0, width * sizeof(bf16));
          continue;
        }
        top[r - strip] = -__builtin_inff();
        total[r - strip] = softmax_row(a, reinterpret_cast<const float*>(scores + (r - strip) * kScoreRow), row, width,
                                       first - block, last - block, scales, &top[r - strip]);
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

// The vectors of one piece of direct() in the order of their use: those of K, then those of V, of KV head 0.
template <typename Pool>
struct Stream {
  const Pool* rows[2 * kKeyBlock];
  int64_t k_rows, count, ahead;
  int64_t k_head_stride, v_head_stride, dim;

  // Into the second-level cache: it has more misses under way than the first.
  void fetch(int64_t begin, int64_t end, int64_t kv_head) const {
    end = smaller(end, count);
    for (int64_t i = begin; i < end; ++i) {
      const char* p = reinterpret_cast<const char*>(rows[i] + kv_head * (i < k_rows ? k_head_stride : v_head_stride));
      for (int64_t b = 0; b < dim * static_cast<int64_t>(sizeof(Pool)); b += 64) _mm_prefetch(p + b, _MM_HINT_T1);
    }
  }
};

// sums[16 rows, 16 * Tiles] += weights[16 rows, 32 keys] values: `values` are right operands, one after the other.
template <int Tiles>
inline void add_values(const char* weights, const char* values, char* sums, int64_t sums_row) {
  tile_load<0>(sums, sums_row);
  if constexpr (Tiles > 1) tile_load<1>(sums + kTileRowBytes, sums_row);
  tile_load<4>(weights, kWeightRow);
  tile_load<5>(values, kTileRowBytes);
  tile_dot_bf16<0, 4, 5>();
  if constexpr (Tiles > 1) {
    tile_load<6>(values + kTileBytes, kTileRowBytes);
    tile_dot_bf16<1, 4, 6>();
    tile_store<1>(sums + kTileRowBytes, sums_row);
  }
  tile_store<0>(sums, sums_row);
}

struct DirectScratch {
  char *q, *sums, *scores, *turned, *weights, *tile;
  float *tops, *totals;  // [head, 16 rows]
  int64_t sums_row, bytes;

  DirectScratch(const AttentionArgs& a, int64_t rows, int64_t count, char* from) : sums_row((a.head_dim + 16) * 4) {
    char* at = from;
    const auto take = [&](int64_t size) {
      char* const place = at;
      at += round_up(size, 64);
      return place;
    };
    q = take(count * num_steps(a) * kTileBytes);
    sums = take(count * kRowsOfTile * sums_row);
    scores = take(count * kKeyBlock * kTileRowBytes);  // [key, 16 rows] of each head
    turned = take(rows * kKeyBlock * 4);
    weights = take(count * kRowsOfTile * kWeightRow);
    tile = take(round_up(a.head_dim, kStep) * kSlab * 2);
    tops = reinterpret_cast<float*>(take(count * kRowsOfTile * 4));
    totals = reinterpret_cast<float*>(take(count * kRowsOfTile * 4));
    bytes = at - from;
  }
};

template <typename Pool>
void direct_block(const AttentionArgs& a, const Rows* heads, int64_t count, int64_t begin, int64_t end, int64_t split,
                  char* scratch) {
  const int64_t rows = num_rows(heads[0]), dim = a.head_dim, steps = num_steps(a);
  const int64_t base = begin / kStep * kStep, padded = round_up(end - base, kSlab);
  const DirectScratch at(a, rows, count, scratch);

  Stream<Pool> stream{.k_head_stride = a.k.head_stride, .v_head_stride = a.v.head_stride, .dim = dim};
  int64_t offsets[kKeyBlock];
  const Pool** next = stream.rows;
  const PagedTensor* const pools[] = {&a.k, &a.v};
  for (const PagedTensor* pool : pools) {
    key_offsets(a, *pool, heads[0].pages, begin, end, offsets);
    for (int64_t i = 0; i < padded; ++i)
      *next++ = static_cast<const Pool*>(pool->data) + offsets[larger(smaller(base + i, end - 1) - begin, 0)];
  }
  stream.k_rows = padded;
  stream.count = 2 * padded;
  stream.ahead = round_up(kBytesAhead / (count * dim * static_cast<int64_t>(sizeof(Pool))) + 1, kSlab);
  for (int64_t row = 0; row < stream.ahead; row += kSlab)
    for (int64_t h = 0; h < count; ++h) stream.fetch(row, row + kSlab, heads[h].kv_head);

  for (int64_t h = 0; h < count; ++h)
    for (int64_t s = 0; s < steps; ++s) {
      __m512i x[16];
      for (int64_t r = 0; r < 16; ++r) {
        x[r] = _mm512_setzero_si512();
        if (r >= rows) continue;
        const bf16* from = static_cast<const bf16*>(a.q) + query_offset(a, heads[h], heads[h].row_begin + r);
        x[r] = load_masked(step_mask(a, s), from + s * kStep);
      }
      store_transposed(x, at.q + (h * steps + s) * kTileBytes);
    }
  configure_tiles();

  for (int64_t slab = 0; slab < padded; slab += kSlab)
    for (int64_t h = 0; h < count; ++h) {
      const int64_t kv_head = heads[h].kv_head;
      stream.fetch(stream.ahead + slab, stream.ahead + slab + kSlab, kv_head);
      for (int64_t key = slab; key < slab + kSlab; key += kRowsOfTile) {
        const Pool* const* k = stream.rows + key;
        const int64_t shift = kv_head * a.k.head_stride;
        // The 16 keys are rows of a tile as they lie in a page; else they are put together.
        const bool whole = std::is_same_v<Pool, bf16> && dim % kStep == 0 && a.page_size % kRowsOfTile == 0 &&
            base + key >= begin && base + key + kRowsOfTile <= end;
        tile_zero<0>();
        for (int64_t s = 0; s < steps; ++s) {
          tile_load<5>(at.q + (h * steps + s) * kTileBytes, kTileRowBytes);
          if (whole) {
            tile_load<4>(k[0] + shift + s * kStep, a.k.slot_stride * static_cast<int64_t>(sizeof(Pool)));
          } else {
            for (int i = 0; i < 16; ++i)
              _mm512_storeu_si512(at.tile + i * kTileRowBytes, load_masked(step_mask(a, s), k[i] + shift + s * kStep));
            tile_load<4>(at.tile, kTileRowBytes);
          }
          tile_dot_bf16<0, 4, 5>();
        }
        tile_store<0>(at.scores + (h * kKeyBlock + key) * kTileRowBytes, kTileRowBytes);
      }
    }

  float key_scales[2 * kKeyBlock];
  for (int64_t h = 0; h < count; ++h) {
    const BlockScales scales = gather_scales(a, heads[h], base, begin, end, key_scales);
    for (int64_t key = 0; key < padded; key += 16) {
      __m512i x[16];
      for (int i = 0; i < 16; ++i)
        x[i] = _mm512_loadu_si512(at.scores + (h * kKeyBlock + key + i) * kTileRowBytes);
      transpose(x);
      for (int64_t r = 0; r < rows; ++r) _mm512_storeu_si512(at.turned + (r * kKeyBlock + key) * 4, x[r]);
    }
    char* const weights = at.weights + h * kRowsOfTile * kWeightRow;
    for (int64_t r = 0; r < kRowsOfTile; ++r) {
      bf16* row = reinterpret_cast<bf16*>(weights + r * kWeightRow);
      int64_t first = 0, last = 0;
      if (r < rows) visible_keys(a, position(a, heads[h], heads[h].row_begin + r), begin, end, &first, &last);
      float* const tops = at.tops + h * kRowsOfTile;
      tops[r] = -__builtin_inff();
      at.totals[h * kRowsOfTile + r] = 0;
      if (first < last)
        at.totals[h * kRowsOfTile + r] =
            softmax_row(a, reinterpret_cast<const float*>(at.turned) + r * kKeyBlock, row, padded, first - base,
                        last - base, scales, tops + r);
      else
        std::memset(row, 0, padded * sizeof(bf16));
    }
  }

  std::memset(at.sums, 0, count * kRowsOfTile * at.sums_row);
  for (int64_t slab = 0; slab < padded; slab += kSlab)
    for (int64_t h = 0; h < count; ++h) {
      const int64_t kv_head = heads[h].kv_head, shift = kv_head * a.v.head_stride;
      stream.fetch(stream.ahead + padded + slab, stream.ahead + padded + slab + kSlab, kv_head);
      const Pool* const* v = stream.rows + padded + slab;
      const int64_t seen = end - base - slab;  // of the slab's keys; those after them are not to be touched by a NaN
      for (int64_t i = 0; i < kSlab; i += 2)
        for (int64_t s = 0; s < steps; ++s) {
          const auto row = [&](int64_t key) {
            return key < seen && base + slab + key >= begin ? load_masked(step_mask(a, s), v[key] + shift + s * kStep)
                                                            : _mm512_setzero_si512();
          };
          const __m512i even = row(i), odd = row(i + 1);
          char* const place = at.tile + 2 * s * kTileBytes + i / 2 * kTileRowBytes;
          _mm512_storeu_si512(place, interleave(even, odd));
          _mm512_storeu_si512(place + kTileBytes, _mm512_permutex2var_epi16(even, pairs_high(), odd));
        }
      const char* const weights = at.weights + h * kRowsOfTile * kWeightRow + slab * 2;
      char* const sums = at.sums + h * kRowsOfTile * at.sums_row;
      int64_t d = 0;
      for (; d + 32 <= dim; d += 32)
        add_values<2>(weights, at.tile + d / 16 * kTileBytes, sums + d * 4, at.sums_row);
      if (d < dim) add_values<1>(weights, at.tile + d / 16 * kTileBytes, sums + d * 4, at.sums_row);
    }
  release_tiles();

  for (int64_t h = 0; h < count; ++h)
    for (int64_t r = 0; r < rows; ++r) {
      float* partial = heads[h].partial == nullptr ? nullptr : heads[h].partial + split * rows * (dim + 2);
      const float* sums = reinterpret_cast<const float*>(at.sums + (h * kRowsOfTile + r) * at.sums_row);
      const int64_t i = h * kRowsOfTile + r;
      finish_row(a, heads[h], heads[h].row_begin + r, sums, at.tops[i], at.totals[i], partial);
    }
}

void direct(const AttentionArgs& a, const Rows* heads, int64_t count, int64_t begin, int64_t end, int64_t split,
            char* scratch) {
  if (a.pool == Dtype::bfloat16) direct_block<bf16>(a, heads, count, begin, end, split, scratch);
  else if (a.pool == Dtype::fp8) direct_block<fp8>(a, heads, count, begin, end, split, scratch);
  else direct_block<int8_t>(a, heads, count, begin, end, split, scratch);
}

// all_rows: those of all KV heads of a piece, of which there are at least one each.
int64_t scratch_bytes(const AttentionArgs& a, int64_t all_rows) {
  const int64_t kv_heads = a.heads / a.group;
  return larger(tile_scratch_bytes(a), DirectScratch(a, all_rows, smaller(all_rows, kv_heads), nullptr).bytes);
}

}  // namespace

namespace KVFORGE_ISA {

extern const AttentionKernel bf16_kernel = {
    packed_bytes, scratch_bytes, pack, tile, direct, merge_blocks, true, kRowsOfTile};

}  // namespace KVFORGE_ISA
}  // namespace kvforge
