// Rows of a pool as vectors for dot products of bfloat16 pairs, each cache line loaded once. For files compiled for
// AVX512-BF16 and VBMI; everything here has internal linkage (see cpu_bf16.h). Dimensions come out permuted, in a
// way that depends on the pool's dtype alone.
#pragma once

#include <type_traits>

#include "paged_attention/cpu_bf16_load.h"

namespace kvforge {
namespace {

// Elements of a pool that fill a vector, and vectors of pairs that these of four keys become.
template <typename Pool>
constexpr int64_t kLoad = 64 / static_cast<int64_t>(sizeof(Pool));
template <typename Pool>
constexpr int kParts = static_cast<int>(kLoad<Pool>) / 8;

// The low and high bytes of bfloat16 numbers, by the lowest 7 bits of an 8-bit one's magnitude.
struct ByteTables {
  alignas(64) uint8_t low[128], high[128];
};

constexpr uint16_t bf16_of_integer(int x) {  // at most 127
  if (x == 0) return 0;
  int exponent = 0;
  while (x >> (exponent + 1) != 0) ++exponent;
  return static_cast<uint16_t>(((127 + exponent) << 7) | ((x << (7 - exponent)) & 0x7f));
}

constexpr ByteTables byte_tables(uint16_t (*of)(int)) {
  ByteTables tables{};
  for (int i = 0; i < 128; ++i) {
    tables.low[i] = static_cast<uint8_t>(of(i));
    tables.high[i] = static_cast<uint8_t>(of(i) >> 8);
  }
  return tables;
}

constexpr ByteTables kE4m3Bytes = byte_tables(bf16_of_e4m3), kInt8Bytes = byte_tables(bf16_of_integer);

// Bytes -> bfloat16, exactly: within each 128-bit lane out[0] has the lower eight, out[1] the upper.
template <typename Pool>
inline void widen(__m512i x, __m512i out[2]) {
  constexpr bool kIsInt8 = std::is_same_v<Pool, int8_t>;
  const ByteTables& tables = kIsInt8 ? kInt8Bytes : kE4m3Bytes;
  const __m512i* of_low = reinterpret_cast<const __m512i*>(tables.low);
  const __m512i* of_high = reinterpret_cast<const __m512i*>(tables.high);
  const __m512i magnitude = kIsInt8 ? _mm512_abs_epi8(x) : x;
  const __m512i low = _mm512_permutex2var_epi8(of_low[0], magnitude, of_low[1]);
  __m512i high = _mm512_permutex2var_epi8(of_high[0], magnitude, of_high[1]);
  high = _mm512_ternarylogic_epi32(high, x, _mm512_set1_epi8(-128), 0xf8);  // high | (x & sign)
  if constexpr (kIsInt8) {  // the magnitude of -128 has 8 bits
    const __mmask64 lowest = _mm512_movepi8_mask(magnitude);
    if (__builtin_expect(lowest != 0, 0))
      high = _mm512_mask_mov_epi8(high, lowest, _mm512_set1_epi8(static_cast<char>(0xc3)));
  }
  out[0] = _mm512_unpacklo_epi8(low, high);
  out[1] = _mm512_unpackhi_epi8(low, high);
}

// The numbers of 16-bit words of four each: out[i] has the i-th of each word.
inline void widen_words(__m512i x, __m512i out[4]) {
  out[0] = from_int4(x);
  out[1] = from_int4(_mm512_srli_epi16(x, 4));
  out[2] = from_int4(_mm512_srli_epi16(x, 8));
  out[3] = from_int4(_mm512_srli_epi16(x, 12));
}

// The first `count` elements, or all that fill a vector.
template <bool Whole, typename Pool>
inline __m512i load_row(const Pool* p, int64_t count) {
  if (Whole || count >= kLoad<Pool>) return _mm512_loadu_si512(p);
  const uint64_t bytes = larger(count, 0) * sizeof(Pool);
  return _mm512_maskz_loadu_epi8((uint64_t{1} << bytes) - 1, p);
}

// Elements [d, d + kLoad) of four keys, those from `dim` on 0: lane l of out[part] has the pair of elements
// d + kLoad / 4 * l + 2 * part of each key.
template <bool Whole, typename Pool>
inline void load_keys(const Pool* const* keys, int64_t d, int64_t dim, __m512i out[kParts<Pool>]) {
  __m512i x[4];
  for (int i = 0; i < 4; ++i) x[i] = load_row<Whole>(keys[i] + d, dim - d);
  if constexpr (sizeof(Pool) == 2) {
    const __m512i ab0 = _mm512_unpacklo_epi32(x[0], x[1]), ab1 = _mm512_unpackhi_epi32(x[0], x[1]);
    const __m512i cd0 = _mm512_unpacklo_epi32(x[2], x[3]), cd1 = _mm512_unpackhi_epi32(x[2], x[3]);
    out[0] = _mm512_unpacklo_epi64(ab0, cd0);
    out[1] = _mm512_unpackhi_epi64(ab0, cd0);
    out[2] = _mm512_unpacklo_epi64(ab1, cd1);
    out[3] = _mm512_unpackhi_epi64(ab1, cd1);
  } else {
    const __m512i ab0 = _mm512_unpacklo_epi16(x[0], x[1]), ab1 = _mm512_unpackhi_epi16(x[0], x[1]);
    const __m512i cd0 = _mm512_unpacklo_epi16(x[2], x[3]), cd1 = _mm512_unpackhi_epi16(x[2], x[3]);
    widen<Pool>(_mm512_unpacklo_epi32(ab0, cd0), out);
    widen<Pool>(_mm512_unpackhi_epi32(ab0, cd0), out + 2);
    widen<Pool>(_mm512_unpacklo_epi32(ab1, cd1), out + 4);
    widen<Pool>(_mm512_unpackhi_epi32(ab1, cd1), out + 6);
  }
}

// A query as load_keys() wants it: out is [loads, kParts, 16, 2], each pair repeated four times.
template <typename Pool>
void spread_query(const bf16* q, int64_t dim, bf16* out) {
  for (int64_t d = 0; d < dim; d += kLoad<Pool>)
    for (int64_t part = 0; part < kParts<Pool>; ++part)
      for (int64_t lane = 0; lane < 4; ++lane) {
        const uint32_t pair = query_pair(q, d + kLoad<Pool> / 4 * lane + 2 * part, dim);
        for (int64_t i = 0; i < 4; ++i, out += 2) std::memcpy(out, &pair, sizeof pair);
      }
}

// Elements [d, d + 64) of two keys in pairs, those from `dim` on 0, as four vectors.
template <bool Whole, typename Pool>
inline void load_values(const Pool* even, const Pool* odd, int64_t d, int64_t dim, __m512i out[4]) {
  if constexpr (std::is_same_v<Pool, int4>) {
    const __mmask32 mask = Whole || dim - d >= 64 ? 0xffffffffu : (uint32_t{1} << (dim - d) / 2) - 1;
    const __m512i of_even = _mm512_castsi256_si512(_mm256_maskz_loadu_epi8(mask, advance(even, d)));
    const __m512i of_odd = _mm512_castsi256_si512(_mm256_maskz_loadu_epi8(mask, advance(odd, d)));
    return widen_words(_mm512_permutex2var_epi16(of_even, pairs_low(), of_odd), out);
  }
  const __m512i x = load_row<Whole>(even + d, dim - d), y = load_row<Whole>(odd + d, dim - d);
  if constexpr (sizeof(Pool) == 2) {
    out[0] = _mm512_unpacklo_epi16(x, y);
    out[1] = _mm512_unpackhi_epi16(x, y);
    const __m512i z = load_row<Whole>(even + d + 32, dim - d - 32), w = load_row<Whole>(odd + d + 32, dim - d - 32);
    out[2] = _mm512_unpacklo_epi16(z, w);
    out[3] = _mm512_unpackhi_epi16(z, w);
  } else {
    widen<Pool>(_mm512_unpacklo_epi8(x, y), out);
    widen<Pool>(_mm512_unpackhi_epi8(x, y), out + 2);
  }
}

// Puts sums over load_values(), [columns, 64], in the order of the dimensions.
template <typename Pool>
void order_sums(const float* sums, int64_t columns, float* out) {
  for (int64_t c = 0; c < columns; ++c, sums += 64, out += 64)
    for (int64_t v = 0; v < 4; ++v)
      for (int64_t lane = 0; lane < 4; ++lane) {
        if constexpr (std::is_same_v<Pool, int4>) {
          for (int64_t i = 0; i < 4; ++i) out[16 * lane + 4 * i + v] = sums[16 * v + 4 * lane + i];
          continue;
        }
        const int64_t d = sizeof(Pool) == 2 ? v / 2 * 32 + 8 * lane + v % 2 * 4 : 16 * lane + 4 * v;
        std::memcpy(out + d, sums + 16 * v + 4 * lane, 4 * sizeof(float));
      }
}

}  // namespace
}  // namespace kvforge
