// int8 weights on AVX512-VNNI: tiles of up to 6 rows by the 64 outputs of a panel, whose sums stay in registers.
// vpdpbusd multiplies unsigned with signed bytes, hence the 128 added to the rows, and adds four products to an
// int32 without saturating. Compiled once per instruction set into namespace KVFORGE_ISA, so no inline function with
// external linkage may be used here.
#include <immintrin.h>

#include <utility>

#include "packed_linear/cpu_int8_avx512.h"
#include "packed_linear/cpu_int8_rows.h"

namespace kvforge {
namespace {

constexpr int kTileRows = 6;
constexpr int kVectors = 4;  // of 16 outputs
constexpr int64_t kLine = 64;
constexpr int kLinesOfFew = 2;  // that each of two or three tiles fetches, of a group

template <int... I>
using Indices = std::integer_sequence<int, I...>;

// GCC 12 copies the sums to the stack around the intrinsic; "+v" leaves them where they are.
inline __attribute__((always_inline)) void add_products(__m512i& sum, __m512i row, __m512i weight) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(row), "v"(weight));
}

inline __attribute__((always_inline)) __m512i broadcast_word(const char* p) {
  int32_t word;
  std::memcpy(&word, p, sizeof word);
  return _mm512_set1_epi32(word);
}

// Sums I (row I / kVectors) of a tile and vectors J of the panel; fetches `Lines` lines of `next` per group. Every
// index is a constant, so that the arrays are registers.
template <int Lines, int... I, int... J>
inline __attribute__((always_inline)) void multiply_rows(Indices<I...>, Indices<J...>, const char* rows,
                                                         const LinearTile& t, const char* next, int32_t* sums) {
  const int64_t row_stride = t.band_stride;
  const char* weight = t.weight;
  constexpr auto kHint = Lines == kLinesOfFew && kFewRows > 0 ? _MM_HINT_T0 : _MM_HINT_T1;
  __m512i sum[] = {(t.add ? _mm512_loadu_si512(sums + I * 16) : _mm512_setzero_si512())...};
  for (int64_t g = 0; g < t.groups; ++g, rows += kGroupBytes, weight += kPanelGroupBytes, next += Lines * kLine) {
    const __m512i right[] = {_mm512_loadu_si512(weight + J * kLine)...};
    ((J < Lines ? _mm_prefetch(next + J * kLine, kHint) : void()), ...);
    __m512i left;
    ((left = I % kVectors == 0 ? broadcast_word(rows + I / kVectors * row_stride) : left,
      add_products(sum[I], left, right[I % kVectors])),
     ...);
  }
  (_mm512_storeu_si512(sums + I * 16, sum[I]), ...);
}

template <int Rows, int Lines>
void multiply_rows(const char* rows, const LinearTile& t, const char* next, int32_t* sums) {
  multiply_rows<Lines>(std::make_integer_sequence<int, Rows * kVectors>(),
                       std::make_integer_sequence<int, kVectors>(), rows, t, next, sums);
}

template <int Lines>
void multiply_tile(int64_t num_rows, const char* rows, const LinearTile& t, const char* next, int32_t* sums) {
  switch (num_rows) {
    case 1: return multiply_rows<1, Lines>(rows, t, next, sums);
    case 2: return multiply_rows<2, Lines>(rows, t, next, sums);
    case 3: return multiply_rows<3, Lines>(rows, t, next, sums);
    case 4: return multiply_rows<4, Lines>(rows, t, next, sums);
    case 5: return multiply_rows<5, Lines>(rows, t, next, sums);
    default: return multiply_rows<6, Lines>(rows, t, next, sums);
  }
}

// The rows in tiles of about the same height; the first of several fetch the next block, each its part.
void multiply(const LinearTile& t) {
  const int64_t tiles = (t.num_rows + kTileRows - 1) / kTileRows;
  const bool fetches = t.next != nullptr && (tiles > 1 || kFetchesInOrder);
  const int64_t lines = !fetches ? 0 : tiles == 1 ? 4 : tiles < 4 ? kLinesOfFew : 1, fetching = lines ? 4 / lines : 0;
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t begin = t.num_rows * i / tiles, count = t.num_rows * (i + 1) / tiles - begin;
    const char* rows = t.rows + begin * t.band_stride;
    const char* next = t.next + i * t.groups * lines * kLine;
    int32_t* sums = static_cast<int32_t*>(t.sums) + begin * kPanel;
    switch (i < fetching ? lines : 0) {
      case 4: multiply_tile<4>(count, rows, t, next, sums); break;
      case kLinesOfFew: multiply_tile<kLinesOfFew>(count, rows, t, next, sums); break;
      case 1: multiply_tile<1>(count, rows, t, next, sums); break;
      default: multiply_tile<0>(count, rows, t, next, sums);
    }
  }
}

void prepare(const LinearArgs& a, int64_t begin, int64_t end, char* rows, char* scratch) {
  prepare_rows<uint8_t>(a, begin, end, rows, scratch,
                        [](const bf16* x, int64_t depth, uint8_t* out) { return quantize_row(x, depth, out); });
}

}  // namespace

namespace KVFORGE_ISA {
extern const LinearKernel linear_int8_kernel = {
    .few_rows = kFewRows,
    .takes_x = takes_x,
    .band_bytes = row_bytes<uint8_t>,
    .prepare = prepare,
    .multiply = multiply,
    .dequantize = dequantize<uint8_t>,
    .finish = finish_linear,
};
}

}  // namespace kvforge
