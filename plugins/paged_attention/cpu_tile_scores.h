// What scores are made of by AMX's tiles. Over bfloat16 and fp8 a step of a product is 32 dimensions in bfloat16. Over int8
// and int4 it is 64 bytes: a query becomes words of 16 bits (cpu_query_words.h), each 2^8 times a signed byte plus another
// one, in tiles of their own, and the two sums are exact. Everything here has internal linkage (see cpu_bf16.h).
#pragma once

#include <type_traits>

#include "paged_attention/cpu_query_words.h"
#include "paged_attention/cpu_tiles.h"

namespace kvforge {
namespace {

template <typename Pool>
struct FloatScores {
  static constexpr int kParts = 1;  // tiles of a query's step
  static constexpr int64_t kDims = kStep;
  using Dot = Bf16;

  // A step of a key, of which `dims` dimensions are left.
  static __m512i load(const Pool* key, int64_t dims) { return load_masked(dims >= kDims ? 0xffffffffu : 0xffffu, key); }

  // Writes the steps of a query, each `step_bytes` behind the one before, and returns what scores are multiplied by.
  static float take_query(const AttentionArgs& a, const bf16* q, char* out, int64_t step_bytes, int64_t) {
    for (int64_t d = 0; d < a.head_dim; d += kDims, out += step_bytes)
      _mm512_store_si512(out, load_masked(a.head_dim - d >= kDims ? 0xffffffffu : 0xffffu, q + d));
    return a.scale * a.k_scale * kLog2E;
  }
};

struct SignedBytes {
  template <int C, int A, int B>
  static void dot() { tile_dot_s8s8<C, A, B>(); }
};

// Of int4 a byte is 16 times the number, and a step has its even dimensions first.
template <typename Pool>
struct IntegerScores {
  static constexpr bool kHalves = std::is_same_v<Pool, int4>;
  static constexpr int kParts = 2;
  static constexpr int64_t kDims = 64;
  using Dot = SignedBytes;

  static __m512i load(const Pool* key, int64_t dims) {
    const int64_t bytes = smaller(dims, kDims) / (kHalves ? 2 : 1);
    const __mmask64 mask = bytes == 64 ? ~uint64_t{0} : (uint64_t{1} << bytes) - 1;
    if constexpr (!kHalves) return _mm512_maskz_loadu_epi8(mask, key);
    const __m256i pairs = _mm256_maskz_loadu_epi8(static_cast<__mmask32>(mask), key);
    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_slli_epi16(pairs, 4)), pairs, 1);
    return _mm512_and_si512(both, _mm512_set1_epi8(static_cast<char>(0xf0)));
  }

  // The upper bytes lie `part_bytes` behind the lower ones.
  static float take_query(const AttentionArgs& a, const bf16* q, char* out, int64_t step_bytes, int64_t part_bytes) {
    const QueryWords words(a, q);
    for (int64_t d = 0; d < a.head_dim; d += kDims, out += step_bytes) {
      __m512i first = two(words.at(d), words.at(d + 16)), second = two(words.at(d + 32), words.at(d + 48));
      if constexpr (kHalves) {
        const __m512i odd = _mm512_permutex2var_epi16(first, odd_words(), second);
        first = _mm512_permutex2var_epi16(first, _mm512_sub_epi16(odd_words(), _mm512_set1_epi16(1)), second);
        second = odd;
      }
      store(first, out, out + part_bytes);
      store(second, out + 32, out + part_bytes + 32);
    }
    return words.factor() * (kHalves ? 0x1p-4f : 1.0f);
  }

 private:
  static __m512i two(__m512i low, __m512i high) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(low)), _mm512_cvtepi32_epi16(high), 1);
  }

  static __m512i odd_words() {
    return _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25, 23, 21, 19, 17,
                            15, 13, 11, 9, 7, 5, 3, 1);
  }

  static void store(__m512i words, char* low, char* high) {
    const auto bytes = [](char* p, __m512i x) {
      _mm256_store_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi16_epi8(x));
    };
    bytes(low, words);
    bytes(high, _mm512_srai_epi16(_mm512_add_epi16(words, _mm512_set1_epi16(128)), 8));
  }
};

template <typename Pool>
using ScoresOver =
    std::conditional_t<std::is_same_v<Pool, int8_t> || std::is_same_v<Pool, int4>, IntegerScores<Pool>, FloatScores<Pool>>;

// Scores from sums of a query's parts, each `part_bytes` behind the one before.
template <int Parts>
inline __m512 scores_from(const char* sums, int64_t part_bytes) {
  if constexpr (Parts == 1) return _mm512_loadu_ps(sums);
  return _mm512_cvtepi32_ps(join(_mm512_loadu_si512(sums), _mm512_loadu_si512(sums + part_bytes)));
}

inline int score_parts(const AttentionArgs& a) {
  int parts = 0;
  with_pool(a.k, [&](auto pool) { parts = ScoresOver<decltype(pool)>::kParts; });
  return parts;
}

// Steps of a query's products with keys.
inline int64_t num_steps(const AttentionArgs& a) {
  int64_t dims = 0;
  with_pool(a.k, [&](auto pool) { dims = ScoresOver<decltype(pool)>::kDims; });
  return (a.head_dim + dims - 1) / dims;
}

}  // namespace
}  // namespace kvforge
