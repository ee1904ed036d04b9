// int8 weights without VNNI, in 16-bit products: the sum of two of them does not overflow an int32, unlike the 16 bits of
// vpmaddubsw. Compiled once per instruction set into namespace KVFORGE_ISA, so no inline function with external linkage
// may be used here.
#include "packed_linear/cpu_int8_rows.h"

namespace kvforge {
namespace {

#if defined(__AVX2__)
using Element = uint16_t;
#else
using Element = uint8_t;
#endif
constexpr int64_t kGroupDepth = 4;  // products of a group
constexpr int64_t kRowGroupBytes = kGroupDepth * sizeof(Element);

void prepare(const LinearArgs& a, int64_t begin, int64_t end, char* rows, char* scratch) {
  prepare_rows<Element>(a, begin, end, rows, scratch, quantize_row_plainly<Element>);
}

#if defined(__AVX2__)

// A vector has two sums for each of kOutputs outputs: of the first and of the last two products of their groups.
#if defined(__AVX512F__)
using Vector = __m512i;
constexpr int kTileRows = 6, kOutputs = 8;
Vector widen(const char* p) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
Vector repeat(int64_t group) { return _mm512_set1_epi64(group); }
Vector add(Vector a, Vector b) { return _mm512_add_epi32(a, b); }
Vector multiply(Vector a, Vector b) { return _mm512_madd_epi16(a, b); }
auto add_halves(Vector x) { return _mm512_cvtepi64_epi32(add(x, _mm512_srli_epi64(x, 32))); }
#else
using Vector = __m256i;
constexpr int kTileRows = 4, kOutputs = 4;
Vector widen(const char* p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
Vector repeat(int64_t group) { return _mm256_set1_epi64x(group); }
Vector add(Vector a, Vector b) { return _mm256_add_epi32(a, b); }
Vector multiply(Vector a, Vector b) { return _mm256_madd_epi16(a, b); }
auto add_halves(Vector x) {
  const __m256i low = _mm256_permutevar8x32_epi32(add(x, _mm256_srli_epi64(x, 32)),
                                                  _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6));
  return _mm256_castsi256_si128(low);
}
#endif
using Sums = decltype(add_halves(Vector{}));  // of kOutputs outputs

// Rows times Vectors * kOutputs outputs; fetches the lines of `next` that are its part of the panel.
template <int Rows, int Vectors>
void multiply_rows(const LinearTile& t, const char* rows, int32_t* sums, int64_t column) {
  const char* weight = t.weight + column * kGroupBytes;
  const char* next = t.next == nullptr || rows != t.rows ? weight : t.next + column * kGroupBytes;
  Vector acc[Rows][Vectors] = {};
  for (int64_t g = 0; g < t.groups; ++g, rows += kRowGroupBytes, weight += kPanelGroupBytes, next += kPanelGroupBytes) {
    __builtin_prefetch(next, 0, 2);
    Vector right[Vectors];
#pragma GCC unroll 8
    for (int j = 0; j < Vectors; ++j) right[j] = widen(weight + j * kOutputs * kGroupBytes);
#pragma GCC unroll 8
    for (int i = 0; i < Rows; ++i) {
      int64_t group;
      std::memcpy(&group, rows + i * t.band_stride, sizeof group);
      const Vector left = repeat(group);
#pragma GCC unroll 8
      for (int j = 0; j < Vectors; ++j) acc[i][j] = add(acc[i][j], multiply(left, right[j]));
    }
  }
  for (int i = 0; i < Rows; ++i)
    for (int j = 0; j < Vectors; ++j) {
      int32_t* target = sums + i * kPanel + column + j * kOutputs;
      Sums total = add_halves(acc[i][j]), before{};
      if (t.add) std::memcpy(&before, target, sizeof before);
      typedef int32_t Lanes __attribute__((vector_size(sizeof(Sums))));
      const Lanes both = reinterpret_cast<Lanes>(total) + reinterpret_cast<Lanes>(before);
      std::memcpy(target, &both, sizeof both);
    }
}

template <int Rows>
void multiply_panel(const LinearTile& t, const char* rows, int32_t* sums) {
  constexpr int kVectors = Rows == 1 || kOutputs == 8 ? 4 : 2;
  for (int64_t column = 0; column < kPanel; column += kVectors * kOutputs)
    multiply_rows<Rows, kVectors>(t, rows, sums, column);
}

// The rows in tiles of about the same height.
void multiply(const LinearTile& t) {
  const int64_t tiles = (t.num_rows + kTileRows - 1) / kTileRows;
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t begin = t.num_rows * i / tiles, count = t.num_rows * (i + 1) / tiles - begin;
    const char* rows = t.rows + begin * t.band_stride;
    int32_t* sums = static_cast<int32_t*>(t.sums) + begin * kPanel;
    switch (count) {
      case 1: multiply_panel<1>(t, rows, sums); break;
      case 2: multiply_panel<2>(t, rows, sums); break;
      case 3: multiply_panel<3>(t, rows, sums); break;
      case 4: multiply_panel<4>(t, rows, sums); break;
      case 5: multiply_panel<5>(t, rows, sums); break;
      default: multiply_panel<6>(t, rows, sums);
    }
  }
}

#else

void multiply(const LinearTile& t) {
  for (int64_t r = 0; r < t.num_rows; ++r) {
    int32_t* sums = static_cast<int32_t*>(t.sums) + r * kPanel;
    if (!t.add) std::memset(sums, 0, kPanel * sizeof(int32_t));
    const Element* row = reinterpret_cast<const Element*>(t.rows + r * t.band_stride);
    const int8_t* weight = reinterpret_cast<const int8_t*>(t.weight);
    for (int64_t g = 0; g < t.groups; ++g, row += kGroupDepth, weight += kPanelGroupBytes)
      for (int64_t j = 0; j < kPanel; ++j)
        sums[j] += row[0] * weight[4 * j] + row[1] * weight[4 * j + 1] + row[2] * weight[4 * j + 2] +
            row[3] * weight[4 * j + 3];
  }
}

#endif

}  // namespace

namespace KVFORGE_ISA {
extern const LinearKernel linear_int8_kernel = {
    .row_group_bytes = kRowGroupBytes,
    .depth_block = 64,
    .takes_x = takes_x,
    .band_bytes = row_bytes<Element>,
    .prepare = prepare,
    .multiply = multiply,
    .dequantize = dequantize<Element>,
    .finish = finish_linear,
};
}

}  // namespace kvforge
