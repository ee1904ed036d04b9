// The products of tiles that attention is made of, for strips of 32 rows. Tiles that stand still for some 1000 cycles
// take 1000 more to wake up, so a strip's work changes often between products and weights. Everything here has
// internal linkage (see cpu_bf16.h).
#pragma once

#include "paged_attention/cpu_tile_scores.h"

namespace kvforge {
namespace {

constexpr int64_t kStrip = 32;  // rows of a tile() that are worked on at once, two tiles of them

// Sums of two tiles of queries, [step] each, and keys, [2 tiles of 16 keys, step] of 32. As few products make one, a tile of
// keys at a time, so that a sum is stored late as in FourSums.
template <typename Dot>
class KeyProducts {
 public:
  explicit KeyProducts(int64_t steps) : steps_(steps) {}

  // out[2 tiles of queries, tile of keys]; from one tile of queries to the other `below` bytes, always as many. It is whole
  // after finish().
  void multiply(const char* q, const char* k, char* out, int64_t below) {
    below_ = below;
    two_tiles<0, 1, 2, 3>(q, k, out);
    two_tiles<2, 3, 0, 1>(q, k + steps_ * kTileBytes, out + kTileBytes);
  }

  void finish() {
    if (late_ == nullptr) return;
    tile_store<2>(late_, kTileRowBytes);
    tile_store<3>(late_ + below_, kTileRowBytes);
    late_ = nullptr;
  }

 private:
  template <int Upper, int Lower, int LateUpper, int LateLower>
  inline __attribute__((always_inline)) void two_tiles(const char* q, const char* k, char* out) {
    tile_zero<Upper>();
    tile_zero<Lower>();
    for (int64_t s = 0; s < steps_; ++s, k += kTileBytes, q += kTileBytes) {
      tile_load_once<7>(k, kTileRowBytes);
      tile_load<4>(q, kTileRowBytes);
      Dot::template dot<Upper, 4, 7>();
      tile_load<6>(q + steps_ * kTileBytes, kTileRowBytes);
      Dot::template dot<Lower, 6, 7>();
      if (s > 0 || late_ == nullptr) continue;
      tile_store<LateUpper>(late_, kTileRowBytes);
      tile_store<LateLower>(late_ + below_, kTileRowBytes);
    }
    late_ = out;
  }

  const int64_t steps_;
  char* late_ = nullptr;
  int64_t below_ = 0;
};

// sums[16 dimensions' column, 2 tiles of rows] = weights[2 tiles of rows, chunk] v[chunk, column] over the first `chunks`
// chunks of a block; from one tile of rows of the weights to the other `below` bytes.
class WeightedValues {
 public:
  WeightedValues(int64_t columns, int64_t chunks) : columns_(columns), chunks_(chunks) {}

  void multiply(const char* weights, int64_t below, const char* v, char* sums) const {
    FourSums two_columns(kTileRowBytes, 2 * kTileBytes, kTileBytes);
    int64_t column = 0;
    for (; column + 2 <= columns_; column += 2)
      two_columns.multiply<Bf16>(
          sums + column * 2 * kTileBytes, chunks_,
          [&](auto tile, int64_t c) __attribute__((always_inline)) {
            tile_load<tile.value>(weights + c * kTileBytes + (tile.value - 4) * below, kTileRowBytes);
          },
          [&](auto tile, int64_t c) __attribute__((always_inline)) {
            tile_load_once<tile.value>(v + (c * columns_ + column + tile.value - 6) * kTileBytes, kTileRowBytes);
          },
          [&](auto tile, const char*) __attribute__((always_inline)) { tile_zero<tile.value>(); },
          []() __attribute__((always_inline)) {});
    two_columns.finish();
    if (column < columns_) one_column(weights, below, v + column * kTileBytes, sums + column * 2 * kTileBytes);
  }

 private:
  void one_column(const char* weights, int64_t below, const char* v, char* sums) const {
    tile_zero<0>();
    tile_zero<2>();
    for (int64_t c = 0; c < chunks_; ++c, weights += kTileBytes, v += columns_ * kTileBytes) {
      tile_load<4>(weights, kTileRowBytes);
      tile_load_once<6>(v, kTileRowBytes);
      tile_load<5>(weights + below, kTileRowBytes);
      tile_dot_bf16<0, 4, 6>();
      tile_dot_bf16<2, 5, 6>();
    }
    tile_store<0>(sums, kTileRowBytes);
    tile_store<2>(sums + kTileBytes, kTileRowBytes);
  }

  const int64_t columns_, chunks_;
};

}  // namespace
}  // namespace kvforge
