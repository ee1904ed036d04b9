// Few rows per key by AMX's tiles: keys are the rows of the left operand where they lie in their pages, and heads that
// share a tile fill it. See cpu_tiles.cpp. Compiled into namespace KVFORGE_ISA, so no inline function with external
// linkage may be used here.
#include <type_traits>

#include "paged_attention/cpu_ahead.h"
#include "paged_attention/cpu_groups.h"
#include "paged_attention/cpu_tile_weights.h"

namespace kvforge {
namespace {

constexpr int64_t kSlab = 64;  // keys that are multiplied at once

// Calls part(Count<0>()) to part(Count<Tiles - 1>()): the number of a tile has to be a constant.
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

// The values of 32 keys of a head, 16 * Tiles dimensions from `from` on, as right operands; those of keys outside [low, high) are
// zeros: what is not seen may hold a NaN. pause() is called eight times.
template <int Tiles, typename Pool, typename Pause>
inline void interleave_values(const Pool* const* rows, int64_t head, int64_t from, int64_t low, int64_t high, char* out,
                              const Pause& pause) {
  constexpr int kParts = (Tiles + 1) / 2;
  constexpr __mmask32 kLast = Tiles % 2 != 0 ? 0xffffu : 0xffffffffu;
  const bool whole = low <= 0 && high >= kStep;
  const __m512i to_low = pairs_low(), to_high = pairs_high();
  const auto load = [&](int64_t key, int part) {
    const __mmask32 mask = part + 1 == kParts ? kLast : 0xffffffffu;
    if (!whole && (key < low || key >= high)) return _mm512_setzero_si512();
    return load_masked(mask, advance(rows[key] + head, from + part * kStep));
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
                  int64_t base, int64_t padded, const DirectScratch& at, Ahead& ahead, int64_t lines) {
  const auto [heads, count, begin, end, split] = work;
  const int64_t rows = num_rows(heads[0]), all = rows * count, dim = a.head_dim, steps = num_steps(a);
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
      const int64_t head = heads[step / steps].kv_head * a.k.head_stride;
      // 16 keys are the rows of a tile as they lie in a page; else they are put together.
      if (in_place && base + key >= begin && base + key + kRowsOfTile <= end)
        return {advance(k_rows[key] + head, s * kStep), a.k.slot_stride * static_cast<int64_t>(sizeof(Pool))};
      char* const tile = at.tile + i * kTileBytes;
      for (int64_t r = 0; r < kRowsOfTile; ++r)
        _mm512_storeu_si512(tile + r * kTileRowBytes, load_masked(step_mask(a, s), advance(k_rows[key + r] + head, s * kStep)));
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
  float tops[kRowsOfTile], totals[kRowsOfTile] = {}, key_scales[kScaleFloats];
  ChunkScales of_chunks;
  const ChunkScales* scales = nullptr;
  const auto with_row = [&](int64_t r, const auto& use) {
    const Rows& head = heads[r / rows];
    if (r % rows == 0) scales = of_chunks.take(gather_scales(a, head, base, begin, end, key_scales));
    int64_t first, last;
    visible_keys(a, position(a, head, head.row_begin + r % rows), begin, end, &first, &last);
    const auto of_chunk = [&](int64_t c) -> ChunkScores {
      const char* const at_chunk = at.turned + r * kScoreRow + c * kStep * 4;
      const __m512 x = _mm512_loadu_ps(at_chunk), y = _mm512_loadu_ps(at_chunk + 64);
      return {without_four(x, y), with_four(x, y)};
    };
    const auto place = [&](int64_t c) { return at.weights + r * kWeightRow + c * kTileRowBytes; };
    use(RowScores<decltype(of_chunk)>{of_chunk, first - base, last - base, a.scale * a.k_scale * kLog2E, scales}, place);
  };
  forget_invalid();
  for (int64_t r = 0; r < kRowsOfTile; ++r) {
    tops[r] = -__builtin_inff();
    if (r >= all) {
      std::memset(at.weights + r * kWeightRow, 0, padded * sizeof(bf16));
      continue;
    }
    with_row(r, [&](const auto& row, const auto& place) {
      if (row.first < row.last) {
        tops[r] = row.top();
        totals[r] = row.weigh(tops[r], padded / kStep, place);
      } else {
        std::memset(place(0), 0, padded * sizeof(bf16));
      }
    });
    ahead.fetch(with_softmax);
  }
  if (any_again(tops, totals, kRowsOfTile))
    for (int64_t r = 0; r < all; ++r)
      with_row(r, [&](const auto& row, const auto& place) {
        if (row.first < row.last) again(row, padded / kStep, place, tops[r], totals[r]);
      });

  for (int64_t h = 0; h < count; ++h) {
    const int64_t shift = heads[h].kv_head * a.v.head_stride;
    for (int64_t d = 0; d < dim; d += 64) {
      const auto sum_values = [&](auto tiles) {
        for_tiles<tiles.value>([](auto i) { tile_zero<i.value>(); });
        char* tile = at.tile;
        for (int64_t step = 0; step < padded; step += kStep) {
          const int64_t first = base + step;
          interleave_values<tiles.value>(v_rows + step, shift, d, begin - first, end - first, tile,
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
  Ahead ahead;
  ahead.add<Pool>(a, a.v, a.v_scales, work);
  if (next != nullptr) ahead.add<Pool>(a, a.k, a.k_scales, *next);

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
  for (int64_t h = 0; h < count; h += at_once) {
    const DirectWork part{heads + h, smaller(at_once, count - h), begin, end, split};
    direct_heads(a, part, k_rows, v_rows, base, padded, at, ahead, ahead.lines() * part.count / count);
  }
  release_tiles();
}

}  // namespace

namespace KVFORGE_ISA {

int64_t tiles_direct_scratch_bytes(const AttentionArgs& a) { return DirectScratch(a, nullptr).bytes; }

void tiles_direct(const AttentionArgs& a, const DirectWork& work, const DirectWork* next, char* scratch) {
  with_pool(a, [&](auto pool) { direct_block<decltype(pool)>(a, work, next, scratch); });
}

}  // namespace KVFORGE_ISA
}  // namespace kvforge
