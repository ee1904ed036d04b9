// Few rows per key by AMX's tiles: keys are the rows of the left operand where they lie in their pages, and heads that
// share a tile fill it. See cpu_tiles.cpp. Compiled into namespace KVFORGE_ISA, so no inline function with external
// linkage may be used here.
#include <type_traits>

#include "paged_attention/cpu_ahead.h"
#include "paged_attention/cpu_bf16_vectors.h"
#include "paged_attention/cpu_groups.h"
#include "paged_attention/cpu_tile_scores.h"
#include "paged_attention/cpu_tile_weights.h"

namespace kvforge {
namespace {

// Keys that are multiplied at once.
template <typename Pool>
constexpr int64_t kSlabOver = ScoresOver<Pool>::kParts == 1 ? 64 : 32;

// Calls part(0) to part(Tiles - 1): the number of a tile has to be a constant.
template <int Tiles, typename Part>
inline __attribute__((always_inline)) void for_tiles(const Part& part) {
  part(std::integral_constant<int, 0>());
  if constexpr (Tiles > 1) part(std::integral_constant<int, 1>());
  if constexpr (Tiles > 2) part(std::integral_constant<int, 2>());
  if constexpr (Tiles > 3) part(std::integral_constant<int, 3>());
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

// The same of 32 keys in integers: of a key the sums with lower bytes and behind them those with upper ones, whose right
// operands come in turn. `four` stores them late.
template <typename Keys, typename Pause>
inline void score_keys(FourSums& four, const char* q, int64_t steps, const Keys& keys, char* scores, const Pause& pause) {
  four.multiply<SignedBytes>(
      scores, steps,
      [&](auto tile, int64_t s) __attribute__((always_inline)) {
        const auto [place, row] = keys(s, tile.value - 4);
        tile_load<tile.value>(place, row);
      },
      [&](auto tile, int64_t s) __attribute__((always_inline)) {
        tile_load<tile.value>(q + (2 * s + tile.value - 6) * kTileBytes, kTileRowBytes);
      },
      [](auto tile, const char*) __attribute__((always_inline)) { tile_zero<tile.value>(); }, pause);
}

// int8 as widen() gives it: 2^8 of a number in float16 has bfloat16's sign and mantissa.
inline void widen_bytes(__m512i x, __m512i out[2]) {
#if defined(KVFORGE_SOFTWARE_TILES)
  widen<int8_t>(x, out);
#else
  const __m512i zero = _mm512_setzero_si512();
  const auto wide = [](__m512i upper) {
    __m512i half;
    asm("vcvtw2ph %1, %0" : "=v"(half) : "v"(upper));
    half = _mm512_and_si512(_mm512_srai_epi16(half, 3), _mm512_set1_epi16(static_cast<int16_t>(0x8fff)));
    constexpr int kExponents = (127 - 15 - 8) << 7;
    return _mm512_maskz_add_epi16(_mm512_test_epi16_mask(upper, upper), half, _mm512_set1_epi16(kExponents));
  };
  out[0] = wide(_mm512_unpacklo_epi8(zero, x));
  out[1] = wide(_mm512_unpackhi_epi8(zero, x));
#endif
}

alignas(64) constexpr char kZeros[kMaxHeadDim * sizeof(bf16)] = {};

// The values of 32 keys of a head, 64 dimensions from `from` on, as four right operands in the order of load_values(); those
// of keys outside [low, high) are zeros: what is not seen may hold a NaN. pause() is called eight times.
template <bool Whole, typename Pool, typename Pause>
inline void interleave_values(const char* const* rows, int64_t head, int64_t from, int64_t dim, int64_t low, int64_t high,
                              char* out, const Pause& pause) {
  const bool whole = low <= 0 && high >= kStep;
  const auto row = [&](int64_t key) {
    return whole || (key >= low && key < high) ? reinterpret_cast<const Pool*>(rows[key]) + head
                                               : reinterpret_cast<const Pool*>(kZeros);
  };
  for (int64_t i = 0; i < kStep; i += 2) {
    if (i % 4 == 0) pause();
    __m512i x[4];
    if constexpr (std::is_same_v<Pool, int8_t>) {
      const __m512i even = load_row<Whole>(row(i) + from, dim - from), odd = load_row<Whole>(row(i + 1) + from, dim - from);
      widen_bytes(_mm512_unpacklo_epi8(even, odd), x);
      widen_bytes(_mm512_unpackhi_epi8(even, odd), x + 2);
    } else {
      load_values<Whole>(row(i), row(i + 1), from, dim, x);
    }
#pragma GCC unroll 4
    for (int t = 0; t < 4; ++t) _mm512_store_si512(out + t * kTileBytes + i / 2 * kTileRowBytes, x[t]);
  }
}

// 64 elements, or the first `count`, as two steps.
inline void load_two_steps(const fp8* p, int64_t count, __m512i out[2]) {
  const __mmask64 mask = count >= 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1;
  // widen() takes the lower and the upper eight of each 16 bytes apart.
  const __m512i order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
  widen<fp8>(_mm512_permutexvar_epi64(order, _mm512_maskz_loadu_epi8(mask, p)), out);
}

struct DirectScratch {
  char *q, *sums, *scores, *turned, *weights, *tile;
  float* ordered;
  int64_t sums_row, bytes;

  DirectScratch(const AttentionArgs& a, char* from) : sums_row((round_up(a.head_dim, 64) + 16) * 4) {
    char* at = from;
    const auto take = [&](int64_t size) {
      char* const place = at;
      at += round_up(size, 64);
      return place;
    };
    q = take(kRowsOfTile * score_parts(a) * num_steps(a) * kTileBytes);  // [head, step, part]
    sums = take(kRowsOfTile * sums_row);
    scores = take(kKeyBlock * score_parts(a) * kTileRowBytes);  // [key, part, 16 rows]
    turned = take(kRowsOfTile * kScoreRow);
    weights = take(kRowsOfTile * kWeightRow);
    tile = take(8 * kTileBytes);
    ordered = reinterpret_cast<float*>(take(round_up(a.head_dim, 64) * 4));  // of a row
    bytes = at - from;
  }
};

// Rows of KV heads that together fill a tile, over keys [begin, end), which lie in the block from `base` on: `padded` of
// them are worked on.
struct Block {
  const Rows* heads;
  int64_t count, begin, end, split;
  int64_t base, padded;

  int64_t rows() const { return num_rows(heads[0]); }  // of a head
  // Where partial results of a head's rows go; null where the block is the only one.
  float* partial(int64_t head, int64_t dim) const {
    return heads[head].partial == nullptr ? nullptr : heads[head].partial + split * rows() * (dim + 2);
  }
  // Lines to ask for with each row and each 16 keys, a quarter of all.
  int64_t some_lines(int64_t lines) const { return lines / 4 / (padded / kRowsOfTile + rows() * count) + 1; }
};

// Writes the queries as right operands and what the scores of each row are multiplied by. Every row has zeros in place of
// the other heads' dimensions, which change no sum of finite keys.
template <typename Pool>
void take_queries(const AttentionArgs& a, const Block& block, const DirectScratch& at, float* factors) {
  using Over = ScoresOver<Pool>;
  constexpr int64_t kQueryBytes = Over::kParts * kTileRowBytes;  // of a step of a query
  const int64_t rows = block.rows(), tiles = num_steps(a) * Over::kParts, row_bytes = tiles * kTileRowBytes;
  for (int64_t h = 0; h < block.count; ++h) {
    const Rows& head = block.heads[h];
    char* const of_head = at.weights;  // queries in the rows of a head, at first in the place of weights
    for (int64_t r = 0; r < rows; ++r)
      factors[h * rows + r] =
          Over::take_query(a, static_cast<const bf16*>(a.q) + query_offset(a, head, head.row_begin + r),
                           of_head + r * row_bytes, kQueryBytes, kTileRowBytes);
    for (int64_t i = 0; i < tiles; ++i) {
      __m512i x[16];
      for (int64_t r = 0; r < 16; ++r) {
        const int64_t row = r - h * rows;
        x[r] = row < 0 || row >= rows ? _mm512_setzero_si512()
                                      : _mm512_load_si512(of_head + row * row_bytes + i * kTileRowBytes);
      }
      store_transposed(x, at.q + (h * tiles + i) * kTileBytes);
    }
  }
}

// Scores of the rows, in the rows of at.turned.
template <typename Pool>
void score_block(const AttentionArgs& a, const Block& block, const char* const* k_rows, const DirectScratch& at,
                 Ahead& ahead, int64_t lines) {
  using Over = ScoresOver<Pool>;
  constexpr int kParts = Over::kParts;
  constexpr int64_t kSlab = kSlabOver<Pool>, kQueryBytes = kParts * kTileRowBytes;
  const auto [heads, count, begin, end, split, base, padded] = block;
  const int64_t dim = a.head_dim, steps = num_steps(a);
  const int64_t with_scores = lines / 3 / (padded / kRowsOfTile * count * steps / kParts) + 1;
  const int64_t some = block.some_lines(lines);
  struct Place {
    const void* rows;
    int64_t stride;
  };
  const bool in_place = (std::is_same_v<Pool, bf16> || std::is_same_v<Pool, int8_t>) && dim % Over::kDims == 0 &&
      a.page_size % kRowsOfTile == 0;
  FourSums four(kQueryBytes, kTileRowBytes, kRowsOfTile * kQueryBytes);
  for (int64_t slab = 0; slab < padded; slab += kSlab) {
    const auto keys = [&](int64_t step, int64_t i) -> Place {
      const int64_t key = slab + i * kRowsOfTile, s = step % steps, d = s * Over::kDims;
      const int64_t head = heads[step / steps].kv_head * a.k.head_stride;
      const auto row = [&](int64_t r) { return advance(reinterpret_cast<const Pool*>(k_rows[key + r]) + head, d); };
      // 16 keys are the rows of a tile as they lie in a page; else they are put together.
      if (in_place && base + key >= begin && base + key + kRowsOfTile <= end)
        return {row(0), a.k.slot_stride * static_cast<int64_t>(sizeof(Pool))};
      char* const tile = at.tile + (s % 2 * kSlab / kRowsOfTile + i) * kTileBytes;
      for (int64_t r = 0; r < kRowsOfTile; ++r) {
        char* const place = tile + r * kTileRowBytes;
        if constexpr (std::is_same_v<Pool, fp8>) {
          if (s % 2 != 0) break;  // written with the step before it
          __m512i x[2];
          load_two_steps(row(r), dim - d, x);
          _mm512_store_si512(place, x[0]);
          _mm512_store_si512(place + kSlab / kRowsOfTile * kTileBytes, x[1]);
        } else {
          _mm512_store_si512(place, Over::load(row(r), dim - d));
        }
      }
      return {tile, kTileRowBytes};
    };
    const auto pause = [&] { ahead.fetch(with_scores); };
    char* const scores = at.scores + slab * kQueryBytes;
    if constexpr (kParts == 2) score_keys(four, at.q, count * steps, keys, scores, pause);
    else if (padded - slab >= kSlab) score_keys<4>(at.q, count * steps, keys, scores, pause);
    else score_keys<2>(at.q, count * steps, keys, scores, pause);
  }
  four.finish();

  for (int64_t key = 0; key < padded; key += 16) {
    __m512i x[16];
    for (int i = 0; i < 16; ++i)
      x[i] = reinterpret_cast<__m512i>(scores_from<kParts>(at.scores + (key + i) * kQueryBytes, kTileRowBytes));
    transpose(x);
    for (int64_t r = 0; r < 16; ++r) _mm512_storeu_si512(at.turned + r * kScoreRow + key * 4, x[r]);
    ahead.fetch(some);
  }
}

// Weights of the rows, whose scores are in at.turned, with their tops and sums.
void weigh_block(const AttentionArgs& a, const Block& block, const float* factors, const DirectScratch& at, Ahead& ahead,
                 int64_t lines, float* tops, float* totals) {
  const int64_t rows = block.rows(), all = rows * block.count, base = block.base, padded = block.padded;
  const int64_t some = block.some_lines(lines);
  float key_scales[kScaleFloats];
  ChunkScales of_chunks;
  const ChunkScales* scales = nullptr;
  const auto with_row = [&](int64_t r, const auto& use) {
    const Rows& head = block.heads[r / rows];
    if (r % rows == 0) scales = of_chunks.take(gather_scales(a, head, base, block.begin, block.end, key_scales));
    int64_t first, last;
    visible_keys(a, position(a, head, head.row_begin + r % rows), block.begin, block.end, &first, &last);
    const auto of_chunk = [&](int64_t c) -> ChunkScores {
      const char* const at_chunk = at.turned + r * kScoreRow + c * kStep * 4;
      const __m512 x = _mm512_loadu_ps(at_chunk), y = _mm512_loadu_ps(at_chunk + 64);
      return {without_four(x, y), with_four(x, y)};
    };
    const auto place = [&](int64_t c) { return at.weights + r * kWeightRow + c * kTileRowBytes; };
    use(RowScores<decltype(of_chunk)>{of_chunk, first - base, last - base, factors[r], scales}, place);
  };
  forget_invalid();
  for (int64_t r = 0; r < kRowsOfTile; ++r) {
    tops[r] = -__builtin_inff(), totals[r] = 0;
    if (r >= all) {
      std::memset(at.weights + r * kWeightRow, 0, padded * sizeof(bf16));
      continue;
    }
    if (const float* const partial = block.partial(r / rows, a.head_dim); partial != nullptr) {
      const float* const result = partial + r % rows * (a.head_dim + 2);  // written soon, and no cache holds it any more
      for (int64_t d = 0; d <= a.head_dim; d += 16) _mm_prefetch(result + d, _MM_HINT_T0);
    }
    with_row(r, [&](const auto& row, const auto& place) {
      if (row.first < row.last) {
        tops[r] = row.top();
        totals[r] = row.weigh(tops[r], padded / kStep, place);
      } else {
        std::memset(place(0), 0, padded * sizeof(bf16));
      }
    });
    ahead.fetch(some);
  }
  if (any_again(tops, totals, kRowsOfTile))
    for (int64_t r = 0; r < all; ++r)
      with_row(r, [&](const auto& row, const auto& place) {
        if (row.first < row.last) again(row, padded / kStep, place, tops[r], totals[r]);
      });
}

// Adds the values by at.weights; of the products a head's own rows are taken.
template <typename Pool>
void add_block_values(const AttentionArgs& a, const Block& block, const char* const* v_rows, const DirectScratch& at,
                      Ahead& ahead, int64_t lines, const float* tops, const float* totals) {
  const auto [heads, count, begin, end, split, base, padded] = block;
  const int64_t rows = block.rows(), dim = a.head_dim;
  const int64_t with_values = lines / 2 / (padded / 4 * count * ((dim + 63) / 64)) + 1;
  for (int64_t h = 0; h < count; ++h) {
    const int64_t shift = heads[h].kv_head * a.v.head_stride;
    for (int64_t d = 0; d < dim; d += 64) {
      for_tiles<4>([](auto i) { tile_zero<i.value>(); });
      char* tile = at.tile;
      for (int64_t step = 0; step < padded; step += kStep) {
        const int64_t low = begin - base - step, high = end - base - step;
        const auto interleave = [&](auto whole) {
          interleave_values<whole.value, Pool>(
              v_rows + step, shift, d, dim, low, high, tile, [&] { ahead.fetch(with_values); });
        };
        dim - d >= 64 ? interleave(std::true_type()) : interleave(std::false_type());
        tile_load<4>(at.weights + step * 2, kWeightRow);
        for_tiles<4>([&](auto i) {
          constexpr int kRight = 5 + i.value % 3;
          tile_load<kRight>(tile + i.value * kTileBytes, kTileRowBytes);
          tile_dot_bf16<i.value, 4, kRight>();
        });
        tile = tile == at.tile ? tile + 4 * kTileBytes : at.tile;  // what was just written is still read
      }
      for_tiles<4>([&](auto i) { tile_store<i.value>(at.sums + d * 4 + i.value * kTileRowBytes, at.sums_row); });
    }
    float* const partial = block.partial(h, dim);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t i = h * rows + r;
      order_sums<Pool>(reinterpret_cast<const float*>(at.sums + i * at.sums_row), (dim + 63) / 64, at.ordered);
      finish_row(a, heads[h], heads[h].row_begin + r, at.ordered, tops[i], totals[i], partial);
    }
  }
}

// Where K or V of the keys of a block lie, of KV head 0; keys that are not seen have a neighbour's.
void find_rows(const AttentionArgs& a, const PagedTensor& pool, const Block& block, const char** found) {
  const int64_t row = pool.slot_stride * pool.element_bytes, first = block.begin - block.base;
  int64_t i = first;
  for (int64_t key = block.begin; key < block.end;) {
    const int64_t page = key / a.page_size, slot = key - page * a.page_size;
    const int64_t stop = smaller(block.end, key + a.page_size - slot);
    const char* place = static_cast<const char*>(pool.data) + slot * row +
        block.heads[0].pages[page] * pool.page_stride * pool.element_bytes;
    for (; key < stop; ++key, place += row) found[i++] = place;
  }
  for (; i < block.padded; ++i) found[i] = found[i - 1];
  for (i = 0; i < first; ++i) found[i] = found[first];
}

}  // namespace

namespace KVFORGE_ISA {

int64_t tiles_direct_scratch_bytes(const AttentionArgs& a) { return DirectScratch(a, nullptr).bytes; }

void tiles_direct(const AttentionArgs& a, const DirectWork& work, const DirectWork* next, char* scratch) {
  const int64_t base = work.begin / kStep * kStep;
  const Block all{work.heads, work.count, work.begin, work.end, work.split, base, round_up(work.end - base, kStep)};
  const DirectScratch at(a, scratch);
  Ahead ahead;
  ahead.add(a, a.v, a.v_scales, work);
  if (next != nullptr) ahead.add(a, a.k, a.k_scales, *next);
  const char *k_rows[kKeyBlock], *v_rows[kKeyBlock];
  find_rows(a, a.k, all, k_rows);
  find_rows(a, a.v, all, v_rows);

  configure_tiles();
  const int64_t at_once = kRowsOfTile / all.rows();
  for (int64_t h = 0; h < work.count; h += at_once) {
    Block some = all;
    some.heads += h, some.count = smaller(at_once, work.count - h);
    const int64_t lines = ahead.lines() * some.count / work.count;
    float factors[kRowsOfTile], tops[kRowsOfTile], totals[kRowsOfTile];
    with_pool(a.k, [&](auto pool) {
      take_queries<decltype(pool)>(a, some, at, factors);
      score_block<decltype(pool)>(a, some, k_rows, at, ahead, lines);
    });
    weigh_block(a, some, factors, at, ahead, lines, tops, totals);
    with_pool(a.v, [&](auto pool) {
      add_block_values<decltype(pool)>(a, some, v_rows, at, ahead, lines, tops, totals);
    });
  }
  release_tiles();
}

}  // namespace KVFORGE_ISA
}  // namespace kvforge
