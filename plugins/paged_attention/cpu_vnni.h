// Attention over int8 and int4 in integers. A query and the weights of a key block become 16 bits and a unit, each the
// product with 2^8 of one signed byte plus another one, so that both sums are exact by VNNI, in any order: a score is that of
// the rounded query, a block's values those of rounded weights (cpu_query_words.h). For files compiled for AVX512-BF16 and VNNI; everything here has internal
// linkage (see cpu_bf16.h).
#pragma once

#include "paged_attention/cpu_groups.h"
#include "paged_attention/cpu_query_words.h"
#include "paged_attention/cpu_vnni_pack.h"

namespace kvforge {
namespace {

// 32 words of 16 bits as [8, 2, 4] bytes: of four words the lower bytes, which are signed, then the upper ones.
struct SplitIndex {
  alignas(64) uint8_t of[64];
};

template <typename Pool>
constexpr SplitIndex split_index(bool columns) {  // columns: words are dimensions, to be put in the order of pack_keys()
  SplitIndex index{};
  for (int group = 0; group < 8; ++group)
    for (int i = 0; i < 4; ++i) {
      const bool halves = columns && std::is_same_v<Pool, int4>;
      const int word = halves ? group / 2 * 8 + 2 * i + group % 2 : group * 4 + i;
      index.of[group * 8 + i] = static_cast<uint8_t>(word * 4);
      index.of[group * 8 + 4 + i] = static_cast<uint8_t>(word * 4 + 1);
    }
  return index;
}

constexpr SplitIndex kWeightIndex = split_index<int8_t>(false), kInt8Index = split_index<int8_t>(true),
                     kInt4Index = split_index<int4>(true);

inline __m512i split(const SplitIndex& index, __m512i low, __m512i high) {
  // The upper byte of word + 128 is the one that the lower byte, taken with its sign, is missing.
  const auto carry = [](__m512i x) {
    return _mm512_xor_si512(_mm512_add_epi32(x, _mm512_set1_epi32(128)), _mm512_set1_epi32(128));
  };
  return _mm512_permutex2var_epi8(carry(low), _mm512_load_si512(index.of), carry(high));
}

// A query in integers. `factor` is what its products with keys are multiplied by, in units of log2(e); `start` takes
// kShift out of them.
struct Query {
  float factor;
  int32_t start;
};

inline int64_t query_bytes(int64_t dim) { return round_up(dim, 32) * 2; }

template <typename Pool>
inline Query split_query(const AttentionArgs& a, const bf16* q, char* out) {
  const SplitIndex& index = std::is_same_v<Pool, int4> ? kInt4Index : kInt8Index;
  const QueryWords words(a, q);
  __m512i sum = _mm512_setzero_si512();
  for (int64_t d = 0; d < a.head_dim; d += 32, out += 64) {
    const __m512i x = words.at(d), y = words.at(d + 16);
    sum = _mm512_add_epi32(sum, _mm512_add_epi32(x, y));
    _mm512_store_si512(out, split(index, x, y));
  }
  return {words.factor(), static_cast<int32_t>(-kShift<Pool> * static_cast<int64_t>(_mm512_reduce_add_epi32(sum)))};
}

// sums + x times the four signed bytes at p, in each lane. In assembler, because GCC 12 copies the sums before each
// _mm512_dpbusd_epi32.
inline __m512i add_products(__m512i sums, __m512i x, const char* p) {
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sums) : "v"(x), "m"(*reinterpret_cast<const int32_t*>(p)));
  return sums;
}

inline __m512i add_products(__m512i sums, __m512i x, __m512i y) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(x), "v"(y));
  return sums;
}

inline __m512i broadcast(const char* p) {
  int32_t word;
  std::memcpy(&word, p, sizeof word);
  return _mm512_set1_epi32(word);
}

// scores[row, 0 .. 16) = keys times split queries; columns(use) calls use(column) for each column of the keys.
template <int Rows, typename Columns>
inline __attribute__((always_inline)) void score_keys(const Columns& columns, const char* q, int64_t q_stride,
                                                      const Query* queries, float* scores) {
  __m512i low[Rows], high[Rows];
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) low[r] = _mm512_set1_epi32(queries[r].start), high[r] = _mm512_setzero_si512();
  columns([&](__m512i x) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      low[r] = add_products(low[r], x, q + r * q_stride);
      high[r] = add_products(high[r], x, q + r * q_stride + 4);
    }
    q += 8;
  });
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) _mm512_storeu_ps(scores + r * kKeyBlock, _mm512_cvtepi32_ps(join(low[r], high[r])));
}

constexpr int64_t kWeightBytes = 2 * kKeyBlock;  // of a row's split weights

// sums[row, 16 * Vectors] += split weights times values, over `groups` groups of four keys; values(group, x) writes
// those of a group to x[2].
template <int Rows, int Vectors, typename Values>
inline __attribute__((always_inline)) void add_values(const Values& values, int64_t groups, const char* weights,
                                                      int32_t* sums, int64_t sums_stride) {
  __m512i low[Rows][Vectors], high[Rows][Vectors];
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < Vectors; ++v) {
      low[r][v] = _mm512_loadu_si512(sums + r * sums_stride + 16 * v);
      high[r][v] = _mm512_setzero_si512();
    }
  for (int64_t g = 0; g < groups; ++g, weights += 8) {
    __m512i x[2];
    values(g, x);
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      const __m512i lower = broadcast(weights + r * kWeightBytes), upper = broadcast(weights + r * kWeightBytes + 4);
#pragma GCC unroll 2
      for (int v = 0; v < Vectors; ++v) {
        low[r][v] = add_products(low[r][v], x[v], lower);
        high[r][v] = add_products(high[r][v], x[v], upper);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < Vectors; ++v)
      _mm512_storeu_si512(sums + r * sums_stride + 16 * v, join(low[r][v], high[r][v]));
}

// The same of `vectors` vectors; values(vector, group, x) writes two of a group from an even one on, the last alone.
template <int Rows, typename Values>
inline __attribute__((always_inline)) void add_all_values(const Values& values, int64_t groups, int64_t vectors,
                                                          const char* weights, int32_t* sums, int64_t sums_stride) {
  for (int64_t v = 0; v < vectors; v += 2) {
    const auto of_group = [&](int64_t g, __m512i x[2]) __attribute__((always_inline)) { values(v, g, x); };
    if (v + 2 <= vectors) add_values<Rows, 2>(of_group, groups, weights, sums + 16 * v, sums_stride);
    else add_values<Rows, 1>(of_group, groups, weights, sums + 16 * v, sums_stride);
  }
}

// What the keys of a block weigh for a row: the largest score and the sum of 2^(score - top), then the unit and the sum of
// the split weights, which carry V's scales.
struct Weights {
  float top = -__builtin_inff(), total = 0, unit = 0;
  int32_t sum = 0;
};

// Splits the weights of keys [first, last), others 0, of `width`, a multiple of 32. Overwrites the scores.
template <bool Masked, bool Scaled>
inline Weights split_weights(float* scores, int64_t width, int64_t first, int64_t last, float factor,
                             const BlockScales& scales, char* out) {
  const int64_t begin = Masked ? first / 32 * 32 : 0, end = Masked ? round_up(last, 32) : width;
  const auto seen = [&](int64_t j) { return Masked ? lanes_between(j, first, last) : static_cast<__mmask16>(0xffff); };
  const __m512 scale = _mm512_set1_ps(factor);
  __m512 highest = _mm512_set1_ps(-__builtin_inff());
  for (int64_t j = begin; j < end; j += 16) {
    __m512 x = _mm512_loadu_ps(scores + j);
    if (Scaled) x = _mm512_mul_ps(x, _mm512_loadu_ps(scales.k + j));
    x = _mm512_mul_ps(x, scale);
    _mm512_storeu_ps(scores + j, x);
    highest = _mm512_mask_max_ps(highest, seen(j), highest, x);
  }
  Weights result{_mm512_reduce_max_ps(highest)};
  const __m512 peak = _mm512_set1_ps(result.top);
  __m512 total = _mm512_setzero_ps();
  __m512i high = _mm512_setzero_si512();
  for (int64_t j = begin; j < end; j += 16) {
    __m512 p = _mm512_maskz_mov_ps(seen(j), exp2_nonpositive(_mm512_sub_ps(_mm512_loadu_ps(scores + j), peak)));
    total = _mm512_add_ps(total, p);
    if (Scaled) p = _mm512_maskz_mul_ps(seen(j), p, _mm512_loadu_ps(scales.v + j));
    _mm512_storeu_ps(scores + j, p);
    high = _mm512_max_epi32(high, magnitude(p));
  }
  result.total = _mm512_reduce_add_ps(total);
  const float largest_weight = largest(high);
  result.unit = largest_weight / kWhole;
  const __m512 inverse = _mm512_set1_ps(kWhole / largest_weight);
  __m512i sum = _mm512_setzero_si512();
  for (int64_t j = begin; j < end; j += 32) {
    const __m512i x = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(scores + j), inverse));
    const __m512i y = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(scores + j + 16), inverse));
    sum = _mm512_add_epi32(sum, _mm512_add_epi32(x, y));
    _mm512_store_si512(out + 2 * j, split(kWeightIndex, x, y));
  }
  if (Masked) {
    std::memset(out, 0, 2 * begin);
    std::memset(out + 2 * end, 0, 2 * (width - end));
  }
  result.sum = _mm512_reduce_add_epi32(sum);
  return result;
}

// The same of the keys that a query at `position` sees among [begin, end) of the block from `block` on.
inline Weights split_weights(const AttentionArgs& a, int64_t position, int64_t begin, int64_t end, int64_t block,
                             int64_t width, float factor, const BlockScales& scales, float* scores, char* out) {
  int64_t first, last;
  visible_keys(a, position, begin, end, &first, &last);
  if (first >= last) {
    std::memset(out, 0, 2 * width);
    return {};
  }
  first -= block, last -= block;
  const bool whole = first == 0 && last == width;
  if (scales.k == nullptr)
    return whole ? split_weights<false, false>(scores, width, first, last, factor, scales, out)
                 : split_weights<true, false>(scores, width, first, last, factor, scales, out);
  return whole ? split_weights<false, true>(scores, width, first, last, factor, scales, out)
               : split_weights<true, true>(scores, width, first, last, factor, scales, out);
}

}  // namespace
}  // namespace kvforge
