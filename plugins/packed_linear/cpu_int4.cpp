// int4 weights: unsigned codes times the signed bytes of a quantized row, summed exactly over a group of the depth, less
// the group's zero points times the sum of the row's bytes. With steps a group's sum is multiplied by them and added as
// an integer; with scales it is scaled and added as float, group after group, and the file is compiled without
// contraction of products and sums. So a sum has the same bits whatever the tile's rows and the instruction set.
// Compiled once per instruction set into namespace KVFORGE_ISA, so no inline function with external linkage may be used
// here.
#if defined(__AVX512F__)
#include "packed_linear/cpu_int8_avx512.h"
#else
#include "packed_linear/cpu_int8.h"
#endif
#include "packed_linear/cpu_int4.h"
#include "packed_linear/cpu_int4_vectors.h"

namespace kvforge {
namespace {

constexpr int64_t kRowGroupBytes = kInt4GroupDepth + 4;  // a row's values, then their negative sum

int64_t num_groups(const LinearArgs& a) { return (a.depth + kInt4GroupDepth - 1) / kInt4GroupDepth; }

int64_t scale_offset(const LinearArgs& a) { return num_groups(a) * kRowGroupBytes; }

// An odd number of cache lines, so that the same place of many rows is not in the same set of the cache.
int64_t row_bytes(const LinearArgs& a) { return ((scale_offset(a) + 4 + 63) / 64 | 1) * 64; }

bool takes_x(const LinearArgs&) { return false; }

float quantize(const bf16* x, int64_t depth, uint8_t* out) {
#if defined(__AVX512F__)
  return quantize_row(x, depth, out);
#else
  return quantize_row_plainly(x, depth, out);
#endif
}

template <Scales S>
void prepare(const LinearArgs& a, int64_t begin, int64_t end, char* rows, char* scratch) {
  bf16* changed = reinterpret_cast<bf16*>(scratch);
  uint8_t* quantized = reinterpret_cast<uint8_t*>(changed + a.depth);
  const int64_t groups = num_groups(a);
  for (int64_t r = begin; r < end; ++r, rows += row_bytes(a)) {
    const float scale = quantize(row_to_quantize(a, row_of_x(a, r), changed), a.depth, quantized);
    std::memset(quantized + a.depth, 0x80, groups * kInt4GroupDepth - a.depth);
    char* out = rows;
    for (int64_t g = 0; g < groups; ++g, out += kRowGroupBytes) {
      int8_t values[kInt4GroupDepth];
      int32_t sum = 0;
      for (int64_t i = 0; i < kInt4GroupDepth; ++i) {
        values[i] = static_cast<int8_t>(quantized[g * kInt4GroupDepth + i] ^ 0x80);
        sum -= values[i];
      }
      if (S != Scales::halves_and_zeros) sum *= kMiddle;
      std::memcpy(out, values, sizeof values);
      std::memcpy(out + sizeof values, &sum, sizeof sum);
    }
    std::memcpy(out, &scale, sizeof scale);
  }
}

// sum * scale of the row * scale of the output.
template <Scales S>
void dequantize(const LinearArgs& a, const char* rows, int64_t row_stride, int64_t num_rows, int64_t panel, void* sums) {
  const auto scale_of = [&](int64_t r) {
    float scale;
    std::memcpy(&scale, rows + r * row_stride + scale_offset(a), sizeof scale);
    return scale;
  };
  if constexpr (S == Scales::steps) return dequantize_rows(a, num_rows, panel, sums, scale_of);
  const float* scales = a.weight_scales + panel * kPanel;
  for (int64_t r = 0; r < num_rows; ++r) {
    const float scale = scale_of(r);
    float* row = static_cast<float*>(sums) + r * kPanel;
    for (int64_t j = 0; j < kPanel; j += kLanes) store(row + j, load(row + j) * scale * load(scales + j));
  }
}

inline __attribute__((always_inline)) int32_t word_at(const char* p) {
  int32_t word;
  std::memcpy(&word, p, sizeof word);
  return word;
}

// Rows times Vectors * kOutputs outputs from `column` on; `Fetch` fetches the lines of `next` that are its part.
template <int Rows, int Vectors, Scales S, bool Fetch>
void multiply_rows(const LinearTile& t, const char* rows, float* sums, int64_t column) {
  constexpr bool kZeros = S == Scales::halves_and_zeros;
  constexpr int64_t kBytes = group_bytes(S);
  using Sum = std::conditional_t<S == Scales::steps, Bytes, Floats>;
  const char* weight = t.weight;
  const char* next = Fetch ? t.next : nullptr;
  Sum sum[Rows][Vectors];
#pragma GCC unroll 8
  for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < Vectors; ++j)
      sum[i][j] = t.add ? load_words<Sum>(sums + i * kPanel + column + j * kOutputs) : Sum{};
  for (int64_t g = 0; g < t.groups; ++g, rows += kRowGroupBytes, weight += kBytes) {
    Bytes zeros[Vectors];
#pragma GCC unroll 8
    for (int j = 0; j < Vectors; ++j)
      zeros[j] = kZeros ? widen_bytes(weight + kZerosOffset + column + j * kOutputs) : Bytes{};
    // Less the zero points times the sum of the row's values.
    const auto shift = [&](int i, int j) __attribute__((always_inline)) {
      const Bytes negative = repeat(word_at(rows + i * t.band_stride + kInt4GroupDepth));
      return kZeros ? multiply_words(zeros[j], negative) : negative;
    };
    Dots dots[Rows][Vectors];
#pragma GCC unroll 8
    for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 8
      for (int j = 0; j < Vectors; ++j) dots[i][j] = first_dots(shift(i, j));
#pragma GCC unroll 4
    for (int64_t c = 0; c < kChunks; ++c) {
      Bytes low[Vectors], high[Vectors];
#pragma GCC unroll 8
      for (int j = 0; j < Vectors; ++j) {
        const int64_t place = c * kChunkBytes + (column + j * kOutputs) * 4;
        if (Fetch && j * kOutputs * 4 % 64 == 0) __builtin_prefetch(next + place, 0, 2);
        unpack(weight + place, low[j], high[j]);
      }
#pragma GCC unroll 8
      for (int i = 0; i < Rows; ++i) {
        const char* values = rows + i * t.band_stride + c * kChunkDepth;
        const Bytes first = repeat(word_at(values)), second = repeat(word_at(values + 4));
#pragma GCC unroll 8
        for (int j = 0; j < Vectors; ++j) {
          add_products(dots[i][j], low[j], first);
          add_products(dots[i][j], high[j], second);
        }
      }
    }
    if constexpr (Fetch) {
      if (column == 0)
        for (int64_t line = kScalesOffset; line < kBytes; line += 64) __builtin_prefetch(next + line, 0, 2);
      next += kBytes;
    }
#pragma GCC unroll 8
    for (int j = 0; j < Vectors; ++j) {
      if constexpr (S == Scales::steps) {
        const Bytes steps = widen_steps(weight + kScalesOffset + column + j * kOutputs);
#pragma GCC unroll 8
        for (int i = 0; i < Rows; ++i) add_steps(sum[i][j], to_integers(dots[i][j], shift(i, j)), steps);
      } else {
        const Floats scale = half_floats(weight + kScalesOffset + (column + j * kOutputs) * 2);
#pragma GCC unroll 8
        for (int i = 0; i < Rows; ++i) sum[i][j] += scale * to_floats(to_integers(dots[i][j], shift(i, j)));
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < Vectors; ++j) store_words(sums + i * kPanel + column + j * kOutputs, sum[i][j]);
}

template <int Rows, Scales S, bool Fetch>
void multiply_panel(const LinearTile& t, const char* rows, float* sums) {
  constexpr int kVectors = Rows <= kTallRows ? kWideVectors : kNarrowVectors;
  for (int64_t column = 0; column < kPanel; column += kVectors * kOutputs)
    multiply_rows<Rows, kVectors, S, Fetch>(t, rows, sums, column);
}

// Up to Rows rows.
template <int Rows, Scales S, bool Fetch>
void multiply_tile(int64_t count, const LinearTile& t, const char* rows, float* sums) {
  if constexpr (Rows > 1) {
    if (count < Rows) return multiply_tile<Rows - 1, S, Fetch>(count, t, rows, sums);
  }
  multiply_panel<Rows, S, Fetch>(t, rows, sums);
}

// The rows in tiles of about the same height, the first of which fetches the weights that come next: more rows than
// kTallRows read a panel in two passes.
template <Scales S>
void multiply(const LinearTile& t) {
  const bool fetches = t.next != nullptr && (t.num_rows > kTallRows || kFetchesInOrder);
  const int64_t tiles = (t.num_rows + kTileRows - 1) / kTileRows;
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t begin = t.num_rows * i / tiles, count = t.num_rows * (i + 1) / tiles - begin;
    const char* rows = t.rows + begin * t.band_stride;
    float* sums = static_cast<float*>(t.sums) + begin * kPanel;
    if (i == 0 && fetches) multiply_tile<kTileRows, S, true>(count, t, rows, sums);
    else multiply_tile<kTileRows, S, false>(count, t, rows, sums);
  }
}

template <Scales S>
constexpr LinearKernel kernel() {
  return {
      .row_group_bytes = kRowGroupBytes,
      .panel_group_bytes = group_bytes(S),
      .depth_block = 16,
      .takes_x = takes_x,
      .band_bytes = row_bytes,
      .prepare = prepare<S>,
      .multiply = multiply<S>,
      .dequantize = dequantize<S>,
      .finish = KVFORGE_ISA::finish_linear,
  };
}

}  // namespace

namespace KVFORGE_ISA {
extern const LinearKernel linear_int4_kernel = kernel<Scales::steps>();
extern const LinearKernel linear_int4_scales_kernel = kernel<Scales::halves>();
extern const LinearKernel linear_int4_zeros_kernel = kernel<Scales::halves_and_zeros>();
}

}  // namespace kvforge
