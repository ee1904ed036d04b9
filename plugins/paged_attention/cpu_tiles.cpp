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
constexpr int64_t kSlab = 64;   // keys of direct() that are multiplied at once
constexpr int64_t kTilesOfBlock = kKeyBlock / kRowsOfTile;
// Bytes from row to row: an odd number of cache lines, so that the rows of a tile lie in different sets of the cache.
constexpr int64_t kScoreRow = (kKeyBlock + 16) * 4;
constexpr int64_t kWeightRow = (kKeyBlock + 32) * 2;

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

// Lane r of the result is op over the lanes of vectors[r], in the order of _mm512_reduce_add_ps.
template <typename Op>
inline __m512 reduce_rows(const __m512 (&vectors)[16], const Op& op) {
  __m512i words[16];
  for (int r = 0; r < 16; ++r) words[r] = reinterpret_cast<__m512i>(vectors[r]);
  transpose(words);
  __m512 x[16];
  for (int i = 0; i < 16; ++i) x[i] = reinterpret_cast<__m512>(words[i]);
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) x[i] = op(x[i], x[i + half]);
  return x[0];
}

// softmax_row() of 16 rows that see all keys of a block, with the same bits: a row's two sums across lanes wait for one
// another, those of 16 rows do not. factor >= 0.
void softmax_rows(const char* scores, char* weights, float factor, float* tops, float* totals) {
  const __m512 scale = _mm512_set1_ps(factor);
  __m512 sums[16];
  for (int64_t r = 0; r < 16; ++r) {
    const float* row = reinterpret_cast<const float*>(scores + r * kScoreRow);
    __m512 even = _mm512_loadu_ps(row), odd = _mm512_loadu_ps(row + 16);
    for (int64_t j = 32; j < kKeyBlock; j += 32) {
      even = _mm512_max_ps(even, _mm512_loadu_ps(row + j));
      odd = _mm512_max_ps(odd, _mm512_loadu_ps(row + j + 16));
    }
    sums[r] = _mm512_max_ps(even, odd);
  }
  // Rounding keeps the order: the largest score times the factor is the largest product.
  const auto larger_of = [](__m512 x, __m512 y) { return _mm512_max_ps(x, y); };
  _mm512_storeu_ps(tops, _mm512_mul_ps(reduce_rows(sums, larger_of), scale));
  for (int64_t r = 0; r < 16; ++r) {
    const float* row = reinterpret_cast<const float*>(scores + r * kScoreRow);
    char* const out = weights + r * kWeightRow;
    const __m512 peak = _mm512_set1_ps(tops[r]);
    __m512 total = _mm512_setzero_ps();
#pragma GCC unroll 4
    for (int64_t j = 0; j < kKeyBlock; j += 32) {
      const auto weight = [&](int64_t at) {
        return exp2_nonpositive(_mm512_sub_ps(round_product(_mm512_loadu_ps(row + at), scale), peak));
      };
      const __m512 low = weight(j), high = weight(j + 16);
      total = _mm512_add_ps(_mm512_add_ps(total, low), high);
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

void softmax_strip(const AttentionArgs& a, const Rows& rows, const Strip& s, const BlockScales& scales,
                   const char* scores, char* weights, float* tops, float* totals) {
  const float factor = a.scale * a.k_scale * kLog2E;
  // The first row sees the fewest of the later keys, the last one those of a window from the latest on.
  const bool all_seen = s.end - s.begin == kStrip && s.block >= s.first_key && s.block + kKeyBlock <= s.end_key &&
      position(a, rows, rows.row_begin + s.begin) >= s.block + kKeyBlock - 1 &&
      (a.window == 0 || position(a, rows, rows.row_begin + s.end - 1) - a.window < s.block);
  if (all_seen && scales.k == nullptr && factor >= 0) {
    for (int64_t r = 0; r < kStrip; r += kRowsOfTile)
      softmax_rows(scores + r * kScoreRow, weights + r * kWeightRow, factor, tops + r, totals + r);
    return;
  }
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
      softmax_strip(a, rows, {strip, stop, block, begin, end, seen, width}, scales, scores, weights, top, total);
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

// The cache lines that are needed next, in the order of memory: the values of a piece, then the keys of the piece after
// it. They are asked for a few at a time between products: a burst would hold up the loads behind it.
template <typename Pool>
class Ahead {
 public:
  // Adds the rows of the heads of `work` in one of the pools.
  void add(const AttentionArgs& a, const PagedTensor& pool, const DirectWork& work) {
    int64_t offsets[kKeyBlock];
    key_offsets(a, pool, work.heads[0].pages, work.begin, work.end, offsets);
    const int64_t first = work.heads[0].kv_head * pool.head_stride;
    const int64_t last = work.heads[work.count - 1].kv_head * pool.head_stride + a.head_dim;
    for (int64_t i = 0; i < work.end - work.begin; ++i)
      rows_[count_++] = reinterpret_cast<const char*>(static_cast<const Pool*>(pool.data) + offsets[i] + first);
    bytes_ = (last - first) * static_cast<int64_t>(sizeof(Pool));
  }

  // Divides what there is among `count` heads.
  void share_among(int64_t count) { lines_ = count_ * ((bytes_ + 63) / 64) / count; }

  // Lines of a head's share.
  int64_t lines() const { return lines_; }

  void fetch(int64_t lines) {
    for (; lines > 0 && row_ < count_; --lines) {
      _mm_prefetch(rows_[row_] + at_, _MM_HINT_T1);
      at_ += 64;
      if (at_ >= bytes_) at_ = 0, ++row_;
    }
  }

 private:
  const char* rows_[2 * kKeyBlock];
  int64_t count_ = 0, bytes_ = 0, row_ = 0, at_ = 0, lines_ = 0;
};

// Calls part(Count<0>()) to part(Count<Tiles - 1>()): the number of a tile has to be a constant.
template <int N>
struct Count {
  static constexpr int value = N;
};
template <int Tiles, typename Part>
inline __attribute__((always_inline)) void for_tiles(const Part& part) {
  part(Count<0>());
  if constexpr (Tiles > 1) part(Count<1>());
  if constexpr (Tiles > 2) part(Count<2>());
  if constexpr (Tiles > 3) part(Count<3>());
}

// scores[16 * Tiles keys, 16 rows], over `steps` tiles of the depth; keys(step, i) is where rows of the i-th tile of keys
// lie and how far apart, `q` the right operands. pause() is called with every product.
template <int Tiles, typename Keys, typename Pause>
inline void score_keys(const char* q, int64_t steps, const Keys& keys, char* scores, const Pause& pause) {
  for_tiles<Tiles>([](auto i) { tile_zero<i.value>(); });
  for (int64_t s = 0; s < steps; ++s) {
    tile_load<7>(q + s * kTileBytes, kTileRowBytes);
    for_tiles<Tiles>([&](auto i) {
      constexpr int kLeft = 4 + i.value % 3;
      const auto [place, row] = keys(s, i.value);
      tile_load<kLeft>(place, row);
      pause();
      tile_dot_bf16<i.value, kLeft, 7>();
    });
  }
  for_tiles<Tiles>([&](auto i) { tile_store<i.value>(scores + i.value * kTileBytes, kTileRowBytes); });
}

// The values of 32 keys, 16 * Tiles dimensions from `from` on, as right operands; those of keys outside [low, high) are
// zeros: what is not seen may hold a NaN. pause() is called eight times.
template <int Tiles, typename Pool, typename Pause>
inline void interleave_values(const Pool* const* rows, int64_t from, int64_t low, int64_t high, char* out,
                              const Pause& pause) {
  constexpr int kParts = (Tiles + 1) / 2;
  constexpr __mmask32 kLast = Tiles % 2 != 0 ? 0xffffu : 0xffffffffu;
  const bool whole = low <= 0 && high >= kStep;
  const __m512i to_low = pairs_low(), to_high = pairs_high();
  const auto load = [&](int64_t key, int part) {
    const __mmask32 mask = part + 1 == kParts ? kLast : 0xffffffffu;
    if (!whole && (key < low || key >= high)) return _mm512_setzero_si512();
    return load_masked(mask, rows[key] + from + part * kStep);
  };
  for (int64_t i = 0; i < kStep; i += 4) {
    pause();
#pragma GCC unroll 2
    for (int64_t j = i; j < i + 4; j += 2)
#pragma GCC unroll 2
      for (int part = 0; part < kParts; ++part) {
        const __m512i even = load(j, part), odd = load(j + 1, part);
        char* const place = out + 2 * part * kTileBytes + j / 2 * kTileRowBytes;
        _mm512_store_si512(place, _mm512_permutex2var_epi16(even, to_low, odd));
        _mm512_store_si512(place + kTileBytes, _mm512_permutex2var_epi16(even, to_high, odd));
      }
  }
}

struct DirectScratch {
  char *q, *sums, *scores, *turned, *weights, *tile;
  int64_t sums_row, bytes;

  DirectScratch(const AttentionArgs& a, char* from) : sums_row((a.head_dim + 16) * 4) {
    char* at = from;
    const auto take = [&](int64_t size) {
      char* const place = at;
      at += round_up(size, 64);
      return place;
    };
    q = take(kRowsOfTile * num_steps(a) * kTileBytes);
    sums = take(kRowsOfTile * sums_row);
    scores = take(kKeyBlock * kTileRowBytes);  // [key, 16 rows]
    turned = take(kRowsOfTile * kScoreRow);
    weights = take(kRowsOfTile * kWeightRow);
    tile = take(8 * kTileBytes);
    bytes = at - from;
  }
};

// Rows of KV heads that together fill a tile, over one block. In the products with keys every row has zeros in place of
// the other heads' dimensions, which change no sum; of the products with values a head's own rows are taken.
template <typename Pool>
void direct_heads(const AttentionArgs& a, const DirectWork& work, const Pool* const* k_rows, const Pool* const* v_rows,
                  int64_t base, int64_t padded, const DirectScratch& at, Ahead<Pool>& ahead) {
  const auto [heads, count, begin, end, split] = work;
  const int64_t rows = num_rows(heads[0]), all = rows * count, dim = a.head_dim, steps = num_steps(a);
  const int64_t lines = ahead.lines() * count;
  const int64_t with_scores = lines / 3 / (padded / kRowsOfTile * count * steps) + 1;
  const int64_t with_softmax = lines / 4 / (padded / kRowsOfTile + all) + 1;
  const int64_t with_values = lines / 2 / (padded / 4 * count * ((dim + 63) / 64)) + 1;

  for (int64_t h = 0; h < count; ++h)
    for (int64_t s = 0; s < steps; ++s) {
      __m512i x[16];
      for (int64_t r = 0; r < 16; ++r) {
        x[r] = _mm512_setzero_si512();
        if (r < h * rows || r >= (h + 1) * rows) continue;
        const int64_t row = heads[h].row_begin + r - h * rows;
        x[r] = load_masked(step_mask(a, s), static_cast<const bf16*>(a.q) + query_offset(a, heads[h], row) + s * kStep);
      }
      store_transposed(x, at.q + (h * steps + s) * kTileBytes);
    }

  struct Place {
    const void* rows;
    int64_t stride;
  };
  const bool in_place = std::is_same_v<Pool, bf16> && dim % kStep == 0 && a.page_size % kRowsOfTile == 0;
  for (int64_t slab = 0; slab < padded; slab += kSlab) {
    const auto keys = [&](int64_t step, int64_t i) -> Place {
      const int64_t key = slab + i * kRowsOfTile, s = step % steps;
      const int64_t shift = heads[step / steps].kv_head * a.k.head_stride + s * kStep;
      // 16 keys are the rows of a tile as they lie in a page; else they are put together.
      if (in_place && base + key >= begin && base + key + kRowsOfTile <= end)
        return {k_rows[key] + shift, a.k.slot_stride * static_cast<int64_t>(sizeof(Pool))};
      char* const tile = at.tile + i * kTileBytes;
      for (int64_t r = 0; r < kRowsOfTile; ++r)
        _mm512_storeu_si512(tile + r * kTileRowBytes, load_masked(step_mask(a, s), k_rows[key + r] + shift));
      return {tile, kTileRowBytes};
    };
    const auto pause = [&] { ahead.fetch(with_scores); };
    char* const scores = at.scores + slab * kTileRowBytes;
    if (padded - slab >= kSlab) score_keys<4>(at.q, count * steps, keys, scores, pause);
    else score_keys<2>(at.q, count * steps, keys, scores, pause);
  }

  for (int64_t key = 0; key < padded; key += 16) {
    __m512i x[16];
    for (int i = 0; i < 16; ++i) x[i] = _mm512_loadu_si512(at.scores + (key + i) * kTileRowBytes);
    transpose(x);
    for (int64_t r = 0; r < 16; ++r) _mm512_storeu_si512(at.turned + r * kScoreRow + key * 4, x[r]);
    ahead.fetch(with_softmax);
  }
  float tops[kRowsOfTile], totals[kRowsOfTile] = {}, key_scales[2 * kKeyBlock];
  BlockScales scales;
  for (int64_t r = 0; r < kRowsOfTile; ++r) {
    bf16* const row = reinterpret_cast<bf16*>(at.weights + r * kWeightRow);
    tops[r] = -__builtin_inff();
    int64_t first = 0, last = 0;
    if (r < all) {
      const Rows& head = heads[r / rows];
      if (r % rows == 0) scales = gather_scales(a, head, base, begin, end, key_scales);
      visible_keys(a, position(a, head, head.row_begin + r % rows), begin, end, &first, &last);
    }
    if (first >= last) {
      std::memset(row, 0, padded * sizeof(bf16));
      continue;
    }
    totals[r] = softmax_row(a, reinterpret_cast<const float*>(at.turned + r * kScoreRow), row, padded, first - base,
                            last - base, scales, tops + r);
    ahead.fetch(with_softmax);
  }

  for (int64_t h = 0; h < count; ++h) {
    const int64_t shift = heads[h].kv_head * a.v.head_stride;
    for (int64_t d = 0; d < dim; d += 64) {
      const auto sum_values = [&](auto tiles) {
        for_tiles<tiles.value>([](auto i) { tile_zero<i.value>(); });
        char* tile = at.tile;
        for (int64_t step = 0; step < padded; step += kStep) {
          const int64_t first = base + step;
          interleave_values<tiles.value>(v_rows + step, shift + d, begin - first, end - first, tile,
                                         [&] { ahead.fetch(with_values); });
          tile_load<4>(at.weights + step * 2, kWeightRow);
          for_tiles<tiles.value>([&](auto i) {
            constexpr int kRight = 5 + i.value % 3;
            tile_load<kRight>(tile + i.value * kTileBytes, kTileRowBytes);
            tile_dot_bf16<i.value, 4, kRight>();
          });
          tile = tile == at.tile ? tile + 4 * kTileBytes : at.tile;  // what was just written is still read
        }
        for_tiles<tiles.value>(
            [&](auto i) { tile_store<i.value>(at.sums + d * 4 + i.value * kTileRowBytes, at.sums_row); });
      };
      switch (smaller(dim - d, 64)) {
        case 16: sum_values(Count<1>()); break;
        case 32: sum_values(Count<2>()); break;
        case 48: sum_values(Count<3>()); break;
        default: sum_values(Count<4>());
      }
    }
    for (int64_t r = 0; r < rows; ++r) {
      float* partial = heads[h].partial == nullptr ? nullptr : heads[h].partial + split * rows * (dim + 2);
      const int64_t i = h * rows + r;
      finish_row(a, heads[h], heads[h].row_begin + r, reinterpret_cast<const float*>(at.sums + i * at.sums_row), tops[i],
                 totals[i], partial);
    }
  }
}

template <typename Pool>
void direct_block(const AttentionArgs& a, const DirectWork& work, const DirectWork* next, char* scratch) {
  const auto [heads, count, begin, end, split] = work;
  const int64_t base = begin / kStep * kStep, padded = round_up(end - base, kStep);
  const DirectScratch at(a, scratch);
  Ahead<Pool> ahead;
  ahead.add(a, a.v, work);
  if (next != nullptr) ahead.add(a, a.k, *next);
  ahead.share_among(count);

  const Pool *k_rows[kKeyBlock], *v_rows[kKeyBlock];  // of KV head 0; keys that are not seen have a neighbour's
  int64_t offsets[kKeyBlock];
  const auto find_rows = [&](const PagedTensor& pool, const Pool** found) {
    key_offsets(a, pool, heads[0].pages, begin, end, offsets);
    for (int64_t i = 0; i < padded; ++i)
      found[i] = static_cast<const Pool*>(pool.data) + offsets[larger(smaller(base + i, end - 1) - begin, 0)];
  };
  find_rows(a.k, k_rows);
  find_rows(a.v, v_rows);

  configure_tiles();
  const int64_t at_once = kRowsOfTile / num_rows(heads[0]);
  for (int64_t h = 0; h < count; h += at_once)
    direct_heads(a, {heads + h, smaller(at_once, count - h), begin, end, split}, k_rows, v_rows, base, padded, at, ahead);
  release_tiles();
}

void direct(const AttentionArgs& a, const DirectWork& work, const DirectWork* next, char* scratch) {
  if (a.pool == Dtype::bfloat16) direct_block<bf16>(a, work, next, scratch);
  else if (a.pool == Dtype::fp8) direct_block<fp8>(a, work, next, scratch);
  else direct_block<int8_t>(a, work, next, scratch);
}

int64_t scratch_bytes(const AttentionArgs& a, int64_t) {
  return larger(tile_scratch_bytes(a), DirectScratch(a, nullptr).bytes);
}

}  // namespace

namespace KVFORGE_ISA {

extern const AttentionKernel bf16_kernel = {
    packed_bytes, scratch_bytes, pack, tile, direct, merge_blocks, true, kRowsOfTile};

}  // namespace KVFORGE_ISA
}  // namespace kvforge
