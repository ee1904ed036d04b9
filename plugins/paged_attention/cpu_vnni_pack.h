// Keys and values of int8 and int4 as right operands of VNNI's products: unsigned bytes, which are the stored numbers plus
// kShift. For files compiled for AVX512-VBMI; everything here has internal linkage (see cpu_bf16.h).
#pragma once

#include <type_traits>

#include "paged_attention/cpu_bf16.h"

namespace kvforge {
namespace {

constexpr int64_t kChunk = 32;  // bytes of a head that are loaded at once

template <typename Pool>
constexpr int32_t kShift = std::is_same_v<Pool, int4> ? 8 : 128;
template <typename Pool>
constexpr int kPerByte = std::is_same_v<Pool, int4> ? 2 : 1;

// Stored bytes as unsigned numbers: out[i] has the i-th of each byte.
template <typename Pool>
inline void numbers(__m512i x, __m512i out[kPerByte<Pool>]) {
  if constexpr (std::is_same_v<Pool, int4>) {
    const __m512i shift = _mm512_set1_epi8(8), mask = _mm512_set1_epi8(15);
    out[0] = _mm512_ternarylogic_epi32(x, shift, mask, 0x28);  // (x ^ shift) & mask
    out[1] = _mm512_ternarylogic_epi32(_mm512_srli_epi16(x, 4), shift, mask, 0x28);
  } else {
    out[0] = _mm512_xor_si512(x, _mm512_set1_epi8(-128));
  }
}

// Up to kChunk bytes of two places, one in each half.
inline __m512i load_two(const char* low, const char* high, int64_t bytes) {
  if (bytes >= kChunk)
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(low))),
                              _mm256_loadu_si256(reinterpret_cast<const __m256i*>(high)), 1);
  const __mmask32 mask = (uint32_t{1} << bytes) - 1;
  return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_maskz_loadu_epi8(mask, low)),
                            _mm256_maskz_loadu_epi8(mask, high), 1);
}

// Calls use(column) for each column of 16 keys of `bytes` bytes at `offset`, [16 keys, 4]: four elements, of int8 neighbours, of int4
// those of four bytes' lower halves, then those of their upper halves.
template <typename Pool, typename Use>
inline __attribute__((always_inline)) void take_columns(const char* const keys[16], int64_t offset, int64_t bytes,
                                                        const Use& use) {
  for (int64_t b = 0; b < bytes; b += kChunk) {
    const int64_t at = offset + b;
    asm("" : "+r"(keys));  // or GCC keeps the places in vectors over the loop, there being no other registers
    __m512i x[8], t[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) x[i] = load_two(keys[i / 4 * 8 + i % 4] + at, keys[i / 4 * 8 + i % 4 + 4] + at, bytes - b);
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
      t[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
      t[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
      x[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
      x[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
      x[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
      x[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    const auto take = [&](int64_t word, __m512i column) __attribute__((always_inline)) {
      if (b + 4 * word >= bytes) return;
      __m512i of_column[kPerByte<Pool>];
      numbers<Pool>(column, of_column);
#pragma GCC unroll 2
      for (int i = 0; i < kPerByte<Pool>; ++i) use(of_column[i]);
    };
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) take(i, _mm512_shuffle_i64x2(x[i], x[i + 4], 0x88));
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) take(4 + i, _mm512_shuffle_i64x2(x[i], x[i + 4], 0xdd));
  }
}

// 16 keys of `bytes` bytes as [columns, 16 keys, 4].
template <typename Pool>
inline void pack_keys(const char* const keys[16], int64_t offset, int64_t bytes, char* out) {
  take_columns<Pool>(keys, offset, bytes, [&](__m512i column) __attribute__((always_inline)) {
    _mm512_store_si512(out, column);
    out += 64;
  });
}

// Vectors of 16 dimensions that the values of a head are packed in.
template <typename Pool>
inline int64_t value_vectors(int64_t dim) {
  return (bytes_of<Pool>(dim) + 15) / 16 * kPerByte<Pool>;
}

// Up to 16 bytes of four places, one in each quarter.
inline __attribute__((always_inline)) __m512i load_four(const char* const places[4], int64_t offset, int64_t bytes) {
  const __mmask16 mask = bytes >= 16 ? 0xffff : static_cast<__mmask16>((1u << bytes) - 1);
  const auto load = [&](int i) __attribute__((always_inline)) { return _mm_maskz_loadu_epi8(mask, places[i] + offset); };
  __m512i x = _mm512_castsi128_si512(load(0));
  x = _mm512_inserti32x4(x, load(1), 1);
  x = _mm512_inserti32x4(x, load(2), 2);
  return _mm512_inserti32x4(x, load(3), 3);
}

struct ByteIndex {
  alignas(64) uint8_t of[64];
};

constexpr ByteIndex take_fourth(int stride) {
  ByteIndex index{};
  for (int i = 0; i < 64; ++i) index.of[i] = static_cast<uint8_t>(i / 4 + i % 4 * stride);
  return index;
}

constexpr ByteIndex kOfHalves = take_fourth(32), kOfQuarters = take_fourth(16);

// Two vectors of four keys' values, [16 dimensions, 4 keys] each, of up to 32 dimensions at `offset`, whose head ends after
// `bytes` bytes: of int8 in order, of int4 the even ones, then the odd ones.
template <typename Pool>
inline __attribute__((always_inline)) void take_values(const char* const values[4], int64_t offset,
                                                       int64_t bytes, __m512i out[2]) {
  if constexpr (std::is_same_v<Pool, int4>) {
    numbers<Pool>(_mm512_permutexvar_epi8(_mm512_load_si512(kOfQuarters.of), load_four(values, offset, bytes)), out);
  } else {
    const __m512i first = _mm512_load_si512(kOfHalves.of), second = _mm512_add_epi8(first, _mm512_set1_epi8(16));
    const __m512i x = load_two(values[0] + offset, values[1] + offset, bytes);
    const __m512i y = load_two(values[2] + offset, values[3] + offset, bytes);
    numbers<Pool>(_mm512_permutex2var_epi8(x, first, y), out);
    numbers<Pool>(_mm512_permutex2var_epi8(x, second, y), out + 1);
  }
}

// Bytes of a head that take_values() takes at once.
template <typename Pool>
constexpr int64_t kTaken = 32 / kPerByte<Pool>;

// Four keys' values as [vectors, 16 dimensions, 4 keys], in the order of take_values().
template <typename Pool>
inline void pack_values(const char* const values[4], int64_t offset, int64_t bytes, char* out) {
  for (int64_t b = 0; b < bytes; b += kTaken<Pool>) {
    __m512i x[2];
    take_values<Pool>(values, offset + b, bytes - b, x);
    const int64_t count = bytes - b > 16 ? 2 : kPerByte<Pool>;
    for (int64_t i = 0; i < count; ++i, out += 64) _mm512_store_si512(out, x[i]);
  }
}

// Sums over pack_values(), in the order of the dimensions: out has round_up(dim, 32).
template <typename Pool>
inline void order_sums(const int32_t* sums, int64_t vectors, int32_t shift, float unit, float* out) {
  const auto load = [&](int64_t v) {
    const __m512i sum = _mm512_sub_epi32(_mm512_loadu_si512(sums + 16 * v), _mm512_set1_epi32(shift));
    return _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(unit));
  };
  if constexpr (std::is_same_v<Pool, int4>) {
    const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    for (int64_t v = 0; v < vectors; v += 2, out += 32) {
      const __m512 even = load(v), odd = load(v + 1);
      _mm512_storeu_ps(out, _mm512_permutex2var_ps(even, low, odd));
      _mm512_storeu_ps(out + 16, _mm512_permutex2var_ps(even, high, odd));
    }
  } else {
    for (int64_t v = 0; v < vectors; ++v) _mm512_storeu_ps(out + 16 * v, load(v));
  }
}

}  // namespace
}  // namespace kvforge
