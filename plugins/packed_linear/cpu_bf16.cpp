// bfloat16 weights on AVX512-BF16: tiles of up to 6 rows by the 64 outputs of a panel, whose sums stay in registers.
// A single tile reads its weights in order, which the CPU fetches by itself (see kFetchesInOrder). With more, a block comes
// from a cache: the tiles before it fetched it, so that memory is read while rows are multiplied.
#include <immintrin.h>

#include "packed_linear/cpu_bf16_rows.h"

namespace kvforge {
namespace {

constexpr int64_t kTileRows = 6;
constexpr int kVectors = 4;  // of 16 outputs
constexpr int64_t kLine = 64;
constexpr int kLinesOfFew = 2;  // that each of two or three tiles fetches, of a group
static_assert(kFewRows == 3 * kTileRows);

// sums[Rows, kPanel] (+)= rows times weights, each in the order of the depth; fetches `Lines` lines of `next` per group.
template <int Rows, int Lines>
void multiply_rows(const char* rows, int64_t row_stride, const char* weight, int64_t groups, const char* next,
                   float* sums, bool add) {
  __m512 acc[Rows][kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j)
      acc[i][j] = add ? _mm512_loadu_ps(sums + i * kPanel + j * 16) : _mm512_setzero_ps();
  for (int64_t g = 0; g < groups; ++g, rows += kGroupBytes, weight += kPanelGroupBytes) {
    __m512bh right[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j)
      right[j] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(weight + j * kLine));
#pragma GCC unroll 4
    for (int j = 0; j < Lines; ++j) _mm_prefetch(next + j * kLine, Lines == kLinesOfFew ? _MM_HINT_T0 : _MM_HINT_T1);
    next += Lines * kLine;
#pragma GCC unroll 8
    for (int i = 0; i < Rows; ++i) {
      int32_t pair;
      std::memcpy(&pair, rows + i * row_stride, sizeof pair);
      const __m512bh left = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) acc[i][j] = _mm512_dpbf16_ps(acc[i][j], left, right[j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) _mm512_storeu_ps(sums + i * kPanel + j * 16, acc[i][j]);
}

template <int Lines>
void multiply_tile(int64_t num_rows, const char* rows, const LinearTile& t, const char* next, float* sums) {
  switch (num_rows) {
    case 1: return multiply_rows<1, Lines>(rows, t.band_stride, t.weight, t.groups, next, sums, t.add);
    case 2: return multiply_rows<2, Lines>(rows, t.band_stride, t.weight, t.groups, next, sums, t.add);
    case 3: return multiply_rows<3, Lines>(rows, t.band_stride, t.weight, t.groups, next, sums, t.add);
    case 4: return multiply_rows<4, Lines>(rows, t.band_stride, t.weight, t.groups, next, sums, t.add);
    case 5: return multiply_rows<5, Lines>(rows, t.band_stride, t.weight, t.groups, next, sums, t.add);
    default: return multiply_rows<6, Lines>(rows, t.band_stride, t.weight, t.groups, next, sums, t.add);
  }
}

// The rows in tiles of about the same height; the first of several fetch the next block, each its part.
void multiply(const LinearTile& t) {
  const int64_t tiles = (t.num_rows + kTileRows - 1) / kTileRows;
  const int64_t lines = tiles == 1 || t.next == nullptr ? 0 : tiles < 4 ? kLinesOfFew : 1;
  const int64_t fetching = lines ? 4 / lines : 0;
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t begin = t.num_rows * i / tiles, count = t.num_rows * (i + 1) / tiles - begin;
    const char* rows = t.rows + begin * t.band_stride;
    const char* next = t.next + i * t.groups * lines * kLine;
    float* sums = static_cast<float*>(t.sums) + begin * kPanel;
    switch (i < fetching ? lines : 0) {
      case kLinesOfFew: multiply_tile<kLinesOfFew>(count, rows, t, next, sums); break;
      case 1: multiply_tile<1>(count, rows, t, next, sums); break;
      default: multiply_tile<0>(count, rows, t, next, sums);
    }
  }
}

}  // namespace

namespace isa_avx512_bf16 {
extern const LinearKernel linear_bf16_kernel = {
    .few_rows = kFewRows,
    .takes_x = takes_x,
    .band_bytes = row_bytes,
    .prepare = prepare_rows,
    .multiply = multiply,
    .finish = finish_linear,
};
}

}  // namespace kvforge
