// The kernel for bfloat16 queries and pools by AMX's tiles (native/tiles.h). A row has the same bits from tile(), which is
// here, and from direct(): a score is summed in steps of 64 bytes (cpu_tile_scores.h), a weighted value over a key block in
// chunks of 32 keys, whichever of the two operands lies in the rows of the tiles; weights and blocks are made alike
// (cpu_tile_weights.h, cpu_tile_sums.h). Compiled into namespace KVFORGE_ISA, so no inline function with external linkage
// may be used here.
#include "paged_attention/cpu_tile_products.h"
#include "paged_attention/cpu_tile_sums.h"
#include "paged_attention/cpu_tile_weights.h"

namespace kvforge {
namespace {

constexpr int64_t kTilesOfBlock = kKeyBlock / kRowsOfTile;
constexpr int64_t kUnit = 64;  // keys that a strip is multiplied with and weighed for in turn
constexpr int kChunks = kUnit / kStep;
constexpr int64_t kUnits = kKeyBlock / kUnit;
// Bytes from one tile of queries to the next: of a unit's scores, of a block's weights.
constexpr int64_t kScoresBelow = kUnit / 16 * kTileBytes, kWeightsBelow = kChunksOfBlock * kTileBytes;

template <int Parts>
constexpr int64_t unit_bytes = kStrip / 16 * Parts * kScoresBelow;  // of its scores

inline __m512i interleave(__m512i even, __m512i odd) { return _mm512_permutex2var_epi16(even, pairs_low(), odd); }

// Packed block: K as [16 keys' tile, step], then V as [32 keys' chunk, 16 dimensions' column], each a right operand. Of 32
// keys the first tile has those without a 4 in their number (cpu_tile_weights.h).
int64_t k_bytes(const AttentionArgs& a) { return kTilesOfBlock * num_steps(a) * kTileBytes; }
int64_t v_bytes(const AttentionArgs& a) { return kKeyBlock * a.head_dim * 2; }
int64_t packed_bytes(const AttentionArgs& a) { return k_bytes(a) + v_bytes(a); }

// Where the vectors of the keys of a block lie, from the first one on that the sequence needs.
template <typename Pool>
class BlockOf {
 public:
  BlockOf(const AttentionArgs& a, const PagedTensor& pool, const Rows& rows, int64_t begin)
      : first(larger(begin, rows.first_key)), last(smaller(begin + kKeyBlock, rows.end_key)),
        data_(static_cast<const Pool*>(pool.data) + rows.kv_head * pool.head_stride) {
    key_offsets(a, pool, rows.pages, first, last, offsets_);
  }

  bool has(int64_t key) const { return key >= first && key < last; }
  const Pool* at(int64_t key, int64_t d) const { return advance(data_ + offsets_[key - first], d); }

  const int64_t first, last;

 private:
  const Pool* const data_;
  int64_t offsets_[kKeyBlock];
};

template <typename Pool>
void pack_keys(const AttentionArgs& a, const BlockOf<Pool>& block, int64_t begin, char* out) {
  using Over = ScoresOver<Pool>;
  const int64_t steps = num_steps(a);
  for (int64_t key = begin; key < begin + kKeyBlock; key += 16)
    for (int64_t s = 0; s < steps; ++s, out += kTileBytes) {
      if (key / kStep * kStep >= block.last) {
        std::memset(out, 0, kTileBytes);
        continue;
      }
      __m512i x[16];
      for (int i = 0; i < 16; ++i) {
        const int64_t at = key / kStep * kStep + key % kStep / 4 + i / 4 * 8 + i % 4;
        const int64_t d = s * Over::kDims;
        x[i] = block.has(at) ? Over::load(block.at(at, d), a.head_dim - d) : _mm512_setzero_si512();
      }
      store_transposed(x, out);
    }
}

template <typename Pool>
void pack_values(const AttentionArgs& a, const BlockOf<Pool>& block, int64_t begin, char* packed) {
  const auto load = [&](int64_t key, int64_t d) {
    return block.has(key) ? load_masked(0xffff, block.at(key, d)) : _mm512_setzero_si512();
  };
  for (int64_t key = begin; key < begin + kKeyBlock; key += 2) {
    char* out = packed + (key - begin) / kStep * (a.head_dim / 16) * kTileBytes + (key - begin) % kStep / 2 * kTileRowBytes;
    for (int64_t d = 0; d < a.head_dim; d += 16, out += kTileBytes)
      _mm512_storeu_si512(out, interleave(load(key, d), load(key + 1, d)));
  }
}

void pack(const AttentionArgs& a, const Rows& rows, int64_t begin, char* packed) {
  with_pool(a.k, [&](auto pool) { pack_keys(a, BlockOf<decltype(pool)>(a, a.k, rows, begin), begin, packed); });
  with_pool(a.v, [&](auto pool) {
    pack_values(a, BlockOf<decltype(pool)>(a, a.v, rows, begin), begin, packed + k_bytes(a));
  });
}

// The scores of chunk `c` of a unit, of row r of a strip, as they are.
template <int Parts>
inline ChunkScores scores_of(const char* unit, int64_t r, int64_t c) {
  const char* const row = unit + r / 16 * Parts * kScoresBelow + r % 16 * kTileRowBytes + c * 2 * kTileBytes;
  return {scores_from<Parts>(row, kScoresBelow), scores_from<Parts>(row + kTileBytes, kScoresBelow)};
}

// The same with K's scales, of chunk `of_block` of the block.
template <bool Scaled, int Parts>
inline ChunkScores scores_of(const char* unit, int64_t r, int64_t c, const ChunkScales* scales, int64_t of_block) {
  const ChunkScores x = scores_of<Parts>(unit, r, c);
  if constexpr (Scaled) return scaled(x, *scales, of_block);
  return x;
}

inline char* weights_at(char* weights, int64_t r, int64_t chunk) {
  return weights + r / 16 * kWeightsBelow + chunk * kTileBytes + r % 16 * kTileRowBytes;
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

// Rows of a strip and keys of a block, and what is known of them so far. A row sees keys [first, last), numbered from the
// block's first.
struct Strip {
  int64_t count;                              // rows
  int64_t first[kStrip], last[kStrip];        // alike for rows that see nothing
  int64_t latest_first, earliest_last, end;   // of all rows; no row sees key `end` or a later one
  const float* factors;                       // of a row's scores, with log2(e)
  const ChunkScales* scales;                  // or null
  uint32_t topped = 0;                        // rows that have a top
  alignas(64) float tops[kStrip], shifts[kStrip];
  __m512 totals[kStrip];

  // `positions`: of the rows' queries.
  Strip(const AttentionArgs& a, const int64_t* positions, const float* factors, int64_t rows, int64_t block,
        int64_t first_key, int64_t end_key, const ChunkScales* chunk_scales)
      : count(rows), factors(factors), scales(chunk_scales) {
    const int64_t from = larger(first_key - block, 0), to = smaller(end_key - block, kKeyBlock);
    const int64_t window = a.window > 0 ? a.window : INT64_MAX / 2;
    for (int64_t r = 0; r < kStrip; ++r) {
      const int64_t position = positions[r] - block;
      last[r] = larger(smaller(to, position + 1), from);
      first[r] = smaller(larger(from, position - window + 1), last[r]);
      tops[r] = -__builtin_inff(), shifts[r] = 0, totals[r] = _mm512_setzero_ps();
    }
    latest_first = first[0], earliest_last = last[0], end = 0;
    for (int64_t r = 0; r < count; ++r) {
      latest_first = larger(latest_first, first[r]);
      earliest_last = smaller(earliest_last, last[r]);
      end = first[r] < last[r] ? larger(end, last[r]) : end;
    }
  }

  int64_t chunks() const { return (end + kStep - 1) / kStep; }

  bool all_see(int64_t begin, int64_t stop) const { return latest_first <= begin && earliest_last >= stop; }

  void set_top(int64_t r, float top) {
    topped |= uint32_t{1} << r;
    tops[r] = top, shifts[r] = -top * kExponentUnit;
  }
};

// Tops of all rows by the first chunk of a unit that all of them see.
template <bool Scaled, int Parts>
void first_tops(const char* unit, int64_t chunk, Strip& s) {
  for (int64_t from = 0; from < kStrip; from += 16) {
    __m512 highest[16];
    for (int64_t r = 0; r < 16; ++r) {
      const ChunkScores x = scores_of<Scaled, Parts>(unit, from + r, 0, s.scales, chunk);
      const __m512 scale = _mm512_set1_ps(s.factors[from + r]);
      highest[r] = _mm512_max_ps(_mm512_mul_ps(x.without, scale), _mm512_mul_ps(x.with, scale));
    }
    const __m512 tops = reduce_rows(highest, [](__m512 x, __m512 y) { return _mm512_max_ps(x, y); });
    _mm512_store_ps(s.tops + from, tops);
    _mm512_store_ps(s.shifts + from, _mm512_mul_ps(tops, _mm512_set1_ps(-kExponentUnit)));
  }
  s.topped = 0xffffffffu;
}

// Weights of a unit, whose first chunk is `chunk`, that all rows see.
template <bool Scaled, int Parts>
void weigh_whole(const char* unit, int64_t chunk, Strip& s, char* weights) {
  if (s.topped == 0) first_tops<Scaled, Parts>(unit, chunk, s);
  for (int64_t half = 0; half < 2; ++half) {
#pragma GCC unroll 4
    for (int64_t r = half * 16; r < half * 16 + 16; ++r) {
      const __m512 scale = _mm512_set1_ps(s.factors[r] * kExponentUnit), shift = _mm512_set1_ps(s.shifts[r]);
      __m512 total = s.totals[r];
#pragma GCC unroll 2
      for (int c = 0; c < kChunks; ++c)
        _mm512_store_si512(
            weights_at(weights, r, chunk + c),
            weigh_keys<false, Scaled>(scores_of<Scaled, Parts>(unit, r, c, s.scales, chunk + c), scale, shift, 0xffffffffu, s.scales,
                                      chunk + c, total));
      s.totals[r] = total;
    }
  }
}

// The same where a row sees some of the keys or none.
template <bool Scaled, int Parts>
void weigh_part(const char* unit, int64_t chunk, Strip& s, char* weights) {
  for (int64_t r = 0; r < kStrip; ++r) {
    const __m512 scale = _mm512_set1_ps(s.factors[r] * kExponentUnit);
    const int64_t first = r < s.count ? s.first[r] : 0, last = r < s.count ? s.last[r] : 0;
    __m512 total = s.totals[r];
    for (int c = 0; c < kChunks; ++c) {
      const __mmask32 seen = keys_between((chunk + c) * kStep, first, last);
      const ChunkScores scores = scores_of<Scaled, Parts>(unit, r, c, s.scales, chunk + c);
      if (seen != 0 && (s.topped >> r & 1) == 0) s.set_top(r, highest_product(scores, seen, s.factors[r]));
      const __m512 shift = _mm512_set1_ps(s.shifts[r]);
      _mm512_store_si512(weights_at(weights, r, chunk + c),
                         weigh_keys<true, Scaled>(scores, scale, shift, seen, s.scales, chunk + c, total));
    }
    s.totals[r] = total;
  }
}

template <int Parts>
void weigh_unit(const char* unit, int64_t chunk, Strip& s, char* weights) {
  const int64_t begin = chunk * kStep;
  const bool whole = (s.topped == 0 || ~s.topped == 0) && s.all_see(begin, begin + kUnit);
  if (s.scales == nullptr)
    return whole ? weigh_whole<false, Parts>(unit, chunk, s, weights) : weigh_part<false, Parts>(unit, chunk, s, weights);
  return whole ? weigh_whole<true, Parts>(unit, chunk, s, weights) : weigh_part<true, Parts>(unit, chunk, s, weights);
}

// Sums of a strip's queries, [16 rows' tile, part, step], and the keys of a chunk, `k`, at `out`.
template <int Parts, typename Products>
void multiply_chunk(Products& products, const char* q, int64_t steps, const char* k, char* out) {
  constexpr int64_t kTilesAtOnce = 2;
  for (int64_t tile = 0; tile < kStrip / 16 * Parts; tile += kTilesAtOnce)
    products.multiply(q + tile * steps * kTileBytes, k, out + tile * kScoresBelow, kScoresBelow);
}

// again() for the rows of a strip, whose scores over the block are at `units`.
template <int Parts>
void weigh_again(const Strip& s, float* tops, const char* units, char* weights, float* totals) {
  for (int64_t r = 0; r < s.count; ++r) {
    if (s.first[r] == s.last[r]) continue;
    const auto of_chunk = [&](int64_t c) {
      return scores_of<Parts>(units + c / kChunks * unit_bytes<Parts>, r, c % kChunks);
    };
    const RowScores<decltype(of_chunk)> row{of_chunk, s.first[r], s.last[r], s.factors[r], s.scales};
    again(row, kChunksOfBlock, [&](int64_t c) { return weights_at(weights, r, c); }, tops[r], totals[r]);
  }
}

struct TileScratch {
  char *unit, *units, *weights, *sums, *q, *own;
  float* acc;
  int64_t bytes;

  TileScratch(const AttentionArgs& a, char* from) {
    char* at = from;
    const auto take = [&](int64_t size) {
      char* const place = at;
      at += round_up(size, 64);
      return place;
    };
    unit = take(unit_bytes<2>);                  // scores of a unit
    weights = take(2 * kWeightsBelow);           // of a strip and a block
    sums = take(kStrip * a.head_dim * 4);        // of the same
    acc = reinterpret_cast<float*>(take(kTileRows * a.head_dim * 4));  // over all blocks so far
    q = take(kTileRows * score_parts(a) * num_steps(a) * kTileRowBytes);  // [16 rows' tile, part, step]
    units = take(kUnits * unit_bytes<2>);        // scores of a whole block, for weigh_again()
    own = take(packed_bytes(a));
    bytes = at - from;
  }
};

int64_t tile_scratch_bytes(const AttentionArgs& a) { return TileScratch(a, nullptr).bytes; }

// Writes the queries, zeros where a strip lacks rows, and what the scores of each are multiplied by.
template <typename Pool>
void take_queries(const AttentionArgs& a, const Rows& rows, char* q, float* factors) {
  using Over = ScoresOver<Pool>;
  const int64_t count = num_rows(rows), steps = num_steps(a), part_bytes = steps * kTileBytes;
  std::memset(q, 0, round_up(count, kStrip) / 16 * Over::kParts * part_bytes);
  std::memset(factors, 0, kTileRows * sizeof(float));
  for (int64_t r = 0; r < count; ++r)
    factors[r] = Over::take_query(
        a, static_cast<const bf16*>(a.q) + query_offset(a, rows, rows.row_begin + r),
        q + r / 16 * Over::kParts * part_bytes + r % 16 * kTileRowBytes, kTileBytes, part_bytes);
}

// Adds a block of keys to the sums of the rows of a strip.
template <int Parts>
void attend_block(const AttentionArgs& a, Strip& s, const char* q, const char* k, const char* v, const TileScratch& at,
                  SixteenRows* sixteen, float* acc) {
  const int64_t steps = num_steps(a), key_bytes = steps * kTileRowBytes;
  KeyProducts<std::conditional_t<Parts == 1, Bf16, SignedBytes>> products(steps);
  forget_invalid();
  for (int64_t chunk = 0; chunk < s.chunks(); chunk += kChunks) {
    for (int64_t c = 0; c < kChunks; ++c)
      multiply_chunk<Parts>(products, q, steps, k + (chunk + c) * kStep * key_bytes, at.unit + c * 2 * kTileBytes);
    products.finish();
    weigh_unit<Parts>(at.unit, chunk, s, at.weights);
  }
  alignas(64) float totals[kStrip];
  for (int64_t from = 0; from < kStrip; from += 16)
    _mm512_store_ps(totals + from,
                    reduce_rows(s.totals + from, [](__m512 x, __m512 y) { return _mm512_add_ps(x, y); }));
  if (any_again(s.tops, totals, kStrip)) {
    for (int64_t c = 0; c < s.chunks(); ++c)
      multiply_chunk<Parts>(products, q, steps, k + c * kStep * key_bytes,
                            at.units + c / kChunks * unit_bytes<Parts> + c % kChunks * 2 * kTileBytes);
    products.finish();
    weigh_again<Parts>(s, s.tops, at.units, at.weights, totals);
  }
  WeightedValues(a.head_dim / 16, s.chunks()).multiply(at.weights, kWeightsBelow, v, at.sums);
  for (int64_t half = 0; half < 2; ++half) {
    sixteen[half].add(_mm512_load_ps(s.tops + half * 16), _mm512_load_ps(totals + half * 16));
    for (int64_t r = 0; r < smaller(16, s.count - half * 16); ++r)
      sixteen[half].add_sums(r, acc + (half * 16 + r) * a.head_dim,
                             reinterpret_cast<const float*>(at.sums + half * kTileBytes + r * kTileRowBytes),
                             2 * kTileBytes / 4, a.head_dim);
  }
}

void tile(const AttentionArgs& a, const Rows& rows, int64_t begin, int64_t end, const char* packed, char* scratch,
          float* partial) {
  const int64_t count = num_rows(rows), dim = a.head_dim;
  const TileScratch at(a, scratch);
  SixteenRows sixteen[kTileRows / 16];
  int64_t positions[kTileRows];
  float factors[kTileRows];
  for (int64_t r = 0; r < kTileRows; ++r) positions[r] = position(a, rows, rows.row_begin + r);
  with_pool(a.k, [&](auto pool) { take_queries<decltype(pool)>(a, rows, at.q, factors); });
  const int64_t strip_bytes = kStrip / 16 * score_parts(a) * num_steps(a) * kTileBytes;  // of queries
  std::memset(at.acc, 0, count * dim * sizeof(float));
  configure_tiles();
  for (int64_t block = begin / kKeyBlock * kKeyBlock; block < end; block += kKeyBlock) {
    if (packed == nullptr) pack(a, rows, block, at.own);
    const char* const k = packed == nullptr ? at.own : packed;
    if (packed != nullptr) packed += packed_bytes(a);
    float key_scales[kScaleFloats];
    const BlockScales scales = gather_scales(a, rows, block, larger(block, rows.first_key),
                                             smaller(block + kKeyBlock, rows.end_key), key_scales);
    ChunkScales of_chunks;
    const ChunkScales* const chunk_scales = of_chunks.take(scales);
    for (int64_t row = 0; row < count; row += kStrip) {
      Strip s(a, positions + row, factors + row, smaller(kStrip, count - row), block, begin, end, chunk_scales);
      if (s.end == 0) continue;
      const auto attend = score_parts(a) == 1 ? attend_block<1> : attend_block<2>;
      attend(a, s, at.q + row / kStrip * strip_bytes, k, k + k_bytes(a), at, sixteen + row / 16, at.acc + row * dim);
    }
  }
  release_tiles();
  for (int64_t r = 0; r < count; ++r) {
    const SixteenRows& some = sixteen[r / 16];
    finish_row(a, rows, rows.row_begin + r, at.acc + r * dim, some.tops[r % 16], some.totals[r % 16], partial);
  }
}

int64_t scratch_bytes(const AttentionArgs& a, int64_t) {
  return larger(tile_scratch_bytes(a), KVFORGE_ISA::tiles_direct_scratch_bytes(a));
}

}  // namespace

namespace KVFORGE_ISA {

extern const AttentionKernel bf16_kernel = {
    packed_bytes, scratch_bytes, pack, tile, tiles_direct, merge_rows, true, kRowsOfTile};

}  // namespace KVFORGE_ISA
}  // namespace kvforge
