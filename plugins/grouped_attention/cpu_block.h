// Up to kBlock keys of one KV head, in groups of 32: where their tiles and the numbers of their groups are. Compiled once
// per instruction set: everything here has internal linkage.
#pragma once

#include "grouped_attention/cpu_arithmetic.h"
#include "grouped_attention/cpu_rows.h"

namespace kvforge {
namespace {

constexpr int64_t kGroupsOfBlock = kBlock / kGroup;

// Keys [begin, end) from `base` on, whole groups. Tile (l, c) of a group's K lies at k + l * k_line + c * tile bytes, with
// tokens in its lines, that of V at v + l * v_line + c * tile bytes, with channels in its lines. Of sealed keys, group
// numbers of K are [2, head_dim] at k_numbers, those of V for 32 channels [2, page_size] at v_numbers, `v_next` on those for
// the next 32.
struct KeyBlock {
  int64_t base, begin, end;
  int64_t k_line, v_line, v_next;
  const char *k[kGroupsOfBlock], *v[kGroupsOfBlock];
  const uint16_t *k_numbers[kGroupsOfBlock], *v_numbers[kGroupsOfBlock];

  int64_t num_groups() const { return (end - begin) / kGroup; }
};

// The sealed keys [begin, end) of a block, both multiples of 32. A page outside the pool is one that no row sees: another
// is read in its place.
inline KeyBlock sealed_block(const GroupedArgs& a, const GroupedRows& rows, int64_t begin, int64_t end) {
  const SealedLayout& p = a.layout;
  const int64_t columns = p.head_dim / kTileSide, page_columns = p.page_size / kTileSide, tile = p.tile();
  KeyBlock block{begin / kBlock * kBlock, begin, end, columns * tile, page_columns * tile,
                 2 * p.page_size, {}, {}, {}, {}};
  int64_t page = begin / p.page_size, slot = begin % p.page_size;
  for (int64_t i = 0; i < block.num_groups(); ++i) {
    const bool exists = rows.pages[page] >= 0 && rows.pages[page] < a.num_pages;
    const int64_t head = (exists ? rows.pages[page] : 0) * p.kv_heads + rows.kv_head;
    block.k[i] = reinterpret_cast<const char*>(a.k_codes + head * p.codes()) + slot / kTileSide * block.k_line;
    block.v[i] = reinterpret_cast<const char*>(a.v_codes + head * p.codes()) + slot / kTileSide * tile;
    block.k_numbers[i] = a.k_groups + head * p.groups() + slot / kGroup * 2 * p.head_dim;
    block.v_numbers[i] = a.v_groups + head * p.groups() + slot;
    if ((slot += kGroup) == p.page_size) slot = 0, ++page;
  }
  return block;
}

// Asks for what attention will read of a group, into the second-level cache.
inline void fetch(const GroupedArgs& a, const KeyBlock& block, int64_t group) {
  const auto ask = [](const void* from, int64_t bytes) {
    for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(static_cast<const char*>(from) + b, 0, 2);
  };
  const int64_t dim = a.layout.head_dim;
  ask(block.k[group], 2 * block.k_line);
  ask(block.k_numbers[group], 4 * dim);
  for (int64_t line = 0; line < dim / kTileSide; ++line) ask(block.v[group] + line * block.v_line, 2 * a.layout.tile());
  for (int64_t c = 0; c < dim / kGroup; ++c)
    for (int64_t i = 0; i < 2; ++i) ask(block.v_numbers[group] + c * block.v_next + i * a.layout.page_size, 2 * kGroup);
}

inline int64_t exact_bytes(const GroupedArgs& a) { return 2 * kBlock * a.layout.head_dim / kTileSide * kPlainTile / kTileSide; }

// One tile of exact numbers of 16 lines, at `from` and `line` apart, whose 16 columns are `column` apart; those behind
// `lines` and `columns` are zeros.
template <typename T>
inline void exact_tile(const T* from, int64_t line, int64_t column, int64_t lines, int64_t columns, char* out) {
  for (int i = 0; i < kProducts; ++i)
    for (int64_t l = 0; l < kTileSide; ++l) {
      Term pair[kTileSide / kProducts] = {};
      for (int64_t j = 0; j < kTileSide / kProducts; ++j) {
        const int64_t c = i * (kTileSide / kProducts) + j;
        if (l < lines && c < columns) store(pair + j, to_float(from[l * line + c * column]));
      }
      std::memcpy(out + (i * kTileSide + l) * 4, pair, 4);
    }
}

// The keys from `begin` on, before `end`, of the exact page that holds them, as tiles at `out`.
template <typename T>
KeyBlock exact_block(const GroupedArgs& a, const GroupedRows& rows, int64_t begin, int64_t end, char* out) {
  const SealedLayout& p = a.layout;
  const int64_t columns = p.head_dim / kTileSide, count = end - begin, padded = round_up(count, kGroup);
  KeyBlock block{begin, begin, begin + padded, columns * kPlainTile, kBlock / kTileSide * kPlainTile, 0, {}, {}, {}, {}};
  const int64_t token = p.kv_heads * p.head_dim;
  const int64_t first = (rows.exact[begin / p.page_size] * p.page_size + begin % p.page_size) * token +
      rows.kv_head * p.head_dim;
  const T *k = static_cast<const T*>(a.exact_k) + first, *v = static_cast<const T*>(a.exact_v) + first;
  char* const v_out = out + exact_bytes(a) / 2;
  for (int64_t t = 0; t < padded; t += kTileSide)
    for (int64_t c = 0; c < columns; ++c) {
      const int64_t from = t * token + c * kTileSide, left = larger(count - t, 0);
      exact_tile(k + from, token, 1, left, kTileSide, out + (t / kTileSide * columns + c) * kPlainTile);
      exact_tile(v + from, 1, token, kTileSide, left, v_out + c * block.v_line + t / kTileSide * kPlainTile);
    }
  for (int64_t i = 0; i < block.num_groups(); ++i) {
    block.k[i] = out + 2 * i * block.k_line;
    block.v[i] = v_out + 2 * i * kPlainTile;
  }
  return block;
}

}  // namespace
}  // namespace kvforge
