// Bands of rows and their products by tiles (native/tiles.h) of 16 rows by 64 bytes of the depth. A band is 16 rows: for
// each step of 16 groups its tile, then, of quantized rows, their scales. The 64 outputs of a panel are four tiles wide
// as they are packed. A sum is made step by step of the depth, so it has the same bits in any band and beside any rows.
// Used by files that are compiled once per instruction set: everything here has internal linkage.
#pragma once

#include "native/tiles.h"
#include "packed_linear/cpu_int8_avx512.h"

namespace kvforge {
namespace {

constexpr int64_t kStepGroups = 16;
constexpr int64_t kStepBytes = kStepGroups * kPanelGroupBytes;  // of a panel
constexpr int64_t kPanelRow = kPanelGroupBytes;                 // from a group of a panel to the next, and of sums too
constexpr int64_t kLine = 64;
constexpr int64_t kAhead = 2048;  // bytes that the only band of a few rows fetches ahead of itself

static_assert(kPanel * sizeof(float) == kPanelRow);

inline int64_t num_steps(const LinearArgs& a, int64_t group_depth) {
  return (a.depth + kStepGroups * group_depth - 1) / (kStepGroups * group_depth);
}

inline bool takes_x(const LinearArgs&) { return false; }

// Copies `bytes` bytes of a row to its places in the tiles of a band, zeros after them.
inline void spread(const char* row, int64_t bytes, int64_t steps, char* out) {
  for (int64_t s = 0; s < steps; ++s, out += kTileBytes, row += kTileRowBytes, bytes -= kTileRowBytes) {
    if (bytes >= kTileRowBytes) {
      std::memcpy(out, row, kTileRowBytes);
      continue;
    }
    std::memset(out, 0, kTileRowBytes);
    std::memcpy(out, row, bytes);
  }
}

// Zeros in place of the rows that the last band lacks.
inline void clear_missing(int64_t rows, int64_t steps, char* band) {
  for (int64_t s = 0; s < steps; ++s)
    std::memset(band + s * kTileBytes + rows * kTileRowBytes, 0, (kRowsOfTile - rows) * kTileRowBytes);
}

// Calls prepare(row of x, place of the row in its band) for rows [begin, end).
template <typename Prepare>
inline void in_bands(const LinearArgs& a, int64_t begin, int64_t end, int64_t steps, int64_t band_bytes, char* bands,
                     const Prepare& prepare) {
  for (int64_t r = begin; r < end; ++r) {
    const int64_t i = r - begin;
    prepare(row_of_x(a, r), bands + i / kRowsOfTile * band_bytes + i % kRowsOfTile * kTileRowBytes);
  }
  if (const int64_t rows = (end - begin) % kRowsOfTile; rows != 0)
    clear_missing(rows, steps, bands + (end - begin) / kRowsOfTile * band_bytes);
}

inline int64_t scales_offset(const LinearArgs& a) { return num_steps(a, 4) * kTileBytes; }

inline int64_t quantized_band_bytes(const LinearArgs& a) { return scales_offset(a) + kLine; }

// The scale of row r of some bands.
inline float scale_of_row(const LinearArgs& a, const char* bands, int64_t band_stride, int64_t r) {
  float scale;
  std::memcpy(&scale, bands + r / kRowsOfTile * band_stride + scales_offset(a) + r % kRowsOfTile * 4, sizeof scale);
  return scale;
}

// LinearKernel::prepare of quantized rows, of which each byte is changed by Flip.
template <uint8_t Flip>
void prepare_quantized(const LinearArgs& a, int64_t begin, int64_t end, char* bands, char* scratch) {
  static_assert(kTileRowBytes == 64);
  const int64_t steps = num_steps(a, 4), offset = scales_offset(a);
  bf16* changed = reinterpret_cast<bf16*>(scratch);
  in_bands(a, begin, end, steps, quantized_band_bytes(a), bands, [&](const bf16* x, char* place) {
    const float scale = quantize_row<Flip>(row_to_quantize(a, x, changed), a.depth, reinterpret_cast<uint8_t*>(place),
                                           kTileBytes);
    const int64_t row = (place - bands) % quantized_band_bytes(a) / kTileRowBytes;
    std::memcpy(place - row * kTileRowBytes + offset + row * 4, &scale, sizeof scale);
  });
}

// LinearKernel::dequantize of them.
inline void dequantize_bands(const LinearArgs& a, const char* bands, int64_t band_stride, int64_t num_rows, int64_t panel,
                             void* sums) {
  dequantize_rows(a, num_rows, panel, sums, [&](int64_t r) { return scale_of_row(a, bands, band_stride, r); });
}

// Lines of the weights that are needed next, fetched a few a step.
class Fetch {
 public:
  // `bytes` a multiple of kStepBytes, all to be fetched in `steps` steps.
  Fetch(const char* from, int64_t bytes, int64_t steps) : at_(from), end_(from + bytes), pace_(4 * kLine) {
    while (pace_ * steps < bytes) pace_ *= 2;
  }

  void step() {
    if (at_ == end_) return;
    for (const char* stop = at_ + pace_; at_ < stop; at_ += 4 * kLine) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) __builtin_prefetch(at_ + i * kLine, 0, 2);
    }
  }

 private:
  const char *at_, *end_;
  int64_t pace_;
};

template <int T>
inline void start_sums(const char* place, bool add) {
  if (add) tile_load<T>(place, kPanelRow);
  else tile_zero<T>();
}

// One band by all four tiles of outputs. The only band of a few rows waits for its weights: a step fetches as much as it
// multiplies, kAhead bytes on, in parts, because a burst would hold up the loads behind it.
template <typename Dot, bool Only>
inline void multiply_one(const char* band, const char* weight, int64_t steps, char* sums, bool add, Fetch& fetch) {
  const auto fetch_quarter = [&](int64_t quarter) {
    if constexpr (Only) {
#pragma GCC unroll 16
      for (int64_t i = 0; i < 16; ++i) __builtin_prefetch(weight + kAhead + quarter * kTileBytes + i * kLine, 0, 2);
    }
  };
  start_sums<0>(sums, add);
  start_sums<1>(sums + kTileRowBytes, add);
  start_sums<2>(sums + 2 * kTileRowBytes, add);
  start_sums<3>(sums + 3 * kTileRowBytes, add);
  for (int64_t s = 0; s < steps; ++s, band += kTileBytes, weight += kStepBytes) {
    tile_load<4>(band, kTileRowBytes);
    fetch_quarter(0);
    tile_load<5>(weight, kPanelRow);
    fetch_quarter(1);
    tile_load<6>(weight + kTileRowBytes, kPanelRow);
    fetch_quarter(2);
    tile_load<7>(weight + 2 * kTileRowBytes, kPanelRow);
    fetch_quarter(3);
    Dot::template dot<0, 4, 5>();
    Dot::template dot<1, 4, 6>();
    Dot::template dot<2, 4, 7>();
    tile_load<5>(weight + 3 * kTileRowBytes, kPanelRow);
    Dot::template dot<3, 4, 5>();
    if constexpr (!Only) fetch.step();
  }
  tile_store<0>(sums, kPanelRow);
  tile_store<1>(sums + kTileRowBytes, kPanelRow);
  tile_store<2>(sums + 2 * kTileRowBytes, kPanelRow);
  tile_store<3>(sums + 3 * kTileRowBytes, kPanelRow);
}

template <typename Dot>
void multiply_steps(const LinearTile& t, const char* rows, const char* weight, int64_t steps, bool add, Fetch fetch) {
  const int64_t bands = (t.num_rows + kRowsOfTile - 1) / kRowsOfTile;
  char* sums = static_cast<char*>(t.sums);
  const int64_t b = bands / 2 * 2;
  FourSums two_bands(kPanelRow, kTileRowBytes, kRowsOfTile * kPanelRow);
  for (int64_t half = 0; half < 2; ++half)
    for (int64_t p = 0; p + 2 <= bands; p += 2) {
      const char *const band = rows + p * t.band_stride, *const outputs = weight + half * 2 * kTileRowBytes;
      two_bands.multiply<Dot>(
          sums + p * kRowsOfTile * kPanelRow + half * 2 * kTileRowBytes, steps,
          [&](auto tile, int64_t s) __attribute__((always_inline)) {
            tile_load_once<tile.value>(band + s * kTileBytes + (tile.value - 4) * t.band_stride, kTileRowBytes);
          },
          [&](auto tile, int64_t s) __attribute__((always_inline)) {
            tile_load<tile.value>(outputs + s * kStepBytes + (tile.value - 6) * kTileRowBytes, kPanelRow);
          },
          [&](auto tile, const char* place) __attribute__((always_inline)) { start_sums<tile.value>(place, add); },
          [&]() __attribute__((always_inline)) { fetch.step(); });
    }
  two_bands.finish();
  rows += b * t.band_stride, sums += b * kRowsOfTile * kPanelRow;
  if (bands == 1) multiply_one<Dot, true>(rows, weight, steps, sums, add, fetch);
  else if (b < bands) multiply_one<Dot, false>(rows, weight, steps, sums, add, fetch);
}

template <typename Dot>
void multiply(const LinearTile& t) {
  const int64_t steps = t.groups / kStepGroups, rest = t.groups % kStepGroups;
  const int64_t block = steps * kStepBytes;
  if (steps > 0) {
    const int64_t bands = (t.num_rows + kRowsOfTile - 1) / kRowsOfTile;
    const Fetch fetch(t.next, t.next == nullptr ? 0 : block, bands * steps);
    multiply_steps<Dot>(t, t.rows, t.weight, steps, t.add, fetch);
  }
  if (rest > 0) {  // the last step of the depth, with zeros in place of the groups it lacks
    alignas(64) char last[kStepBytes] = {};
    std::memcpy(last, t.weight + block, rest * kPanelGroupBytes);
    multiply_steps<Dot>(t, t.rows + steps * kTileBytes, last, 1, t.add || steps > 0, Fetch(nullptr, 0, 1));
  }
}

}  // namespace
}  // namespace kvforge
