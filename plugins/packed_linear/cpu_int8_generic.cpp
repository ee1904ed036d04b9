// int8 weights without VNNI. Compiled once per instruction set into namespace KVFORGE_ISA, so no inline function with
// external linkage may be used here.
#include "packed_linear/cpu_int8_rows.h"

namespace kvforge {
namespace {

float quantize_row(const bf16* x, int64_t depth, uint8_t* out) {
  uint32_t largest = 0;  // bits of |x| are ordered as |x| is, NaN last
  for (int64_t i = 0; i < depth; ++i) {
    const uint32_t magnitude = x[i] & 0x7fffu;
    largest = magnitude > largest ? magnitude : largest;
  }
  const float scale = row_scale(largest);
  for (int64_t i = 0; i < depth; ++i) out[i] = static_cast<uint8_t>(to_int8(to_float(x[i]) / scale)) ^ 0x80;
  return scale;
}

void prepare(const LinearArgs& a, int64_t begin, int64_t end, char* rows, char* scratch) {
  prepare_rows(a, begin, end, rows, scratch, quantize_row);
}

#if defined(__AVX2__)

// Rows times Vectors * 4 outputs in 16-bit products, whose pairs do not overflow an int32: unlike vpmaddubsw, whose
// sums of two products saturate at 16 bits. Each vector holds two sums for each of 4 outputs.
template <int Rows, int Vectors>
void multiply_rows(const LinearTile& t, const char* rows, const char* weight, int32_t* sums) {
  __m256i acc[Rows][Vectors] = {};
  for (int64_t g = 0; g < t.groups; ++g, rows += kGroupBytes, weight += kPanelGroupBytes) {
    __m256i right[Vectors];
#pragma GCC unroll 8
    for (int j = 0; j < Vectors; ++j)
      right[j] = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(weight + j * 16)));
#pragma GCC unroll 4
    for (int i = 0; i < Rows; ++i) {
      const __m256i left =
          _mm256_broadcastq_epi64(_mm_cvtepu8_epi16(_mm_loadu_si32(rows + i * t.band_stride)));
#pragma GCC unroll 8
      for (int j = 0; j < Vectors; ++j)
        acc[i][j] = _mm256_add_epi32(acc[i][j], _mm256_madd_epi16(left, right[j]));
    }
  }
  for (int i = 0; i < Rows; ++i)
    for (int j = 0; j < Vectors; j += 2) {
      const __m256i pairs = _mm256_hadd_epi32(acc[i][j], acc[i][j + 1]);
      __m256i total = _mm256_permute4x64_epi64(pairs, 0xd8);
      __m256i* target = reinterpret_cast<__m256i*>(sums + i * kPanel + j * 4);
      if (t.add) total = _mm256_add_epi32(total, _mm256_loadu_si256(target));
      _mm256_storeu_si256(target, total);
    }
}

void multiply(const LinearTile& t) {
  int32_t* sums = static_cast<int32_t*>(t.sums);
  int64_t r = 0;
  for (; r + 4 <= t.num_rows; r += 4)
    for (int64_t j = 0; j < kPanel; j += 8)
      multiply_rows<4, 2>(t, t.rows + r * t.band_stride, t.weight + j * kGroupBytes, sums + r * kPanel + j);
  for (; r < t.num_rows; ++r)
    for (int64_t j = 0; j < kPanel; j += 32)
      multiply_rows<1, 8>(t, t.rows + r * t.band_stride, t.weight + j * kGroupBytes, sums + r * kPanel + j);
}

#else

void multiply(const LinearTile& t) {
  for (int64_t r = 0; r < t.num_rows; ++r) {
    int32_t* sums = static_cast<int32_t*>(t.sums) + r * kPanel;
    if (!t.add) std::memset(sums, 0, kPanel * sizeof(int32_t));
    const uint8_t* row = reinterpret_cast<const uint8_t*>(t.rows + r * t.band_stride);
    const int8_t* weight = reinterpret_cast<const int8_t*>(t.weight);
    for (int64_t g = 0; g < t.groups; ++g, row += kGroupBytes, weight += kPanelGroupBytes)
      for (int64_t j = 0; j < kPanel; ++j)
        sums[j] += row[0] * weight[4 * j] + row[1] * weight[4 * j + 1] + row[2] * weight[4 * j + 2] +
            row[3] * weight[4 * j + 3];
  }
}

#endif

}  // namespace

namespace KVFORGE_ISA {
const LinearKernel linear_int8_kernel = {
    .takes_x = takes_x,
    .band_bytes = row_bytes,
    .prepare = prepare,
    .multiply = multiply,
    .dequantize = dequantize,
    .finish = finish_linear,
};
}

}  // namespace kvforge
