// Weights of scores for AMX's tiles: 2^(score - top) as bfloat16, 32 keys at once. The exponent is a number of 16 bits, 10
// of them behind the point. So its fraction is the mantissa of a float16 in [1, 2), of which a cubic in float16 makes the
// weight's mantissa. A row's top is the highest score of the first 32 keys of a block of which it sees any: it only has to
// be near the highest of all, for a weight may be above 1. Where it is too far below, a row is weighed again
// (kMostTotal). Everything here has internal linkage (see cpu_bf16.h).
#pragma once

#include "paged_attention/cpu_tiles.h"

namespace kvforge {
namespace {

constexpr float kExponentUnit = 1024;  // of an exponent in 16 bits, which reaches from -32 to 32
// A row is weighed again, with the highest score of all as top, if its weights add up to more than kMostTotal, if a
// score lies kFarAbove above the top, where the conversion to integers ends, or if the top is so large that half a unit in
// its last place counts.
constexpr float kMostTotal = 0x1p30f, kFarAbove = 0x1p20f, kLargeTop = 0x1p20f;
constexpr int64_t kChunksOfBlock = kKeyBlock / kStep;

// a b + c of 32 float16, rounded once.
inline __m512i fma_float16(__m512i a, __m512i b, __m512i c) {
#if defined(KVFORGE_SOFTWARE_TILES)
  // In float32 the sum is exact, for the numbers that power_of_two() has.
  const auto half = [&](auto wide) {
    return _mm512_cvtps_ph(_mm512_fmadd_ps(wide(a), wide(b), wide(c)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  };
  const __m256i low = half([](__m512i x) { return _mm512_cvtph_ps(_mm512_castsi512_si256(x)); });
  const __m256i high = half([](__m512i x) { return _mm512_cvtph_ps(_mm512_extracti64x4_epi64(x, 1)); });
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
#else
  asm("vfmadd213ph %2, %1, %0" : "+v"(a) : "v"(b), "v"(c));
  return a;
#endif
}

// 2^(x / 1024) as bfloat16, within 0.65 of a unit in the last place; of 0 it is 1.
inline __m512i power_of_two(__m512i x) {
  const auto all = [](int bits) { return _mm512_set1_epi16(static_cast<int16_t>(bits)); };
  const __m512i fraction = all(1023);
  const __m512i m = _mm512_ternarylogic_epi32(x, fraction, all(0x3c00), 0xea);  // (x & fraction) | 1.0
  __m512i p = fma_float16(all(0x2ce3), m, all(0x9f9e));  // 0.0763549805 m - 0.0074386597
  p = fma_float16(p, m, all(0x37ca));                    // 0.4868164063
  p = fma_float16(p, m, all(0x3725));                    // 0.4465332031, with half a unit of bfloat16 in it
  p = _mm512_ternarylogic_epi32(fraction, p, x, 0xca);   // p's mantissa, x's whole part
  return _mm512_add_epi16(_mm512_srai_epi16(p, 3), all(127 << 7));
}

inline __m512 even_floats(__m512i pairs) { return reinterpret_cast<__m512>(_mm512_slli_epi32(pairs, 16)); }

inline __m512 odd_floats(__m512i pairs) {
  return reinterpret_cast<__m512>(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}

// Of 32 keys in order, those without a 4 in their number, and those with one: _mm512_packs_epi32 of the two is in order.
inline __m512 without_four(__m512 first, __m512 second) {
  const __m512i index = _mm512_set_epi32(27, 26, 25, 24, 19, 18, 17, 16, 11, 10, 9, 8, 3, 2, 1, 0);
  return _mm512_permutex2var_ps(first, index, second);
}

inline __m512 with_four(__m512 first, __m512 second) {
  const __m512i index = _mm512_set_epi32(31, 30, 29, 28, 23, 22, 21, 20, 15, 14, 13, 12, 7, 6, 5, 4);
  return _mm512_permutex2var_ps(first, index, second);
}

// Scores of 32 keys: those without and those with a 4 in their number.
struct ChunkScores {
  __m512 without, with;
};

// The scales of a block's keys by chunks of 32: K's as scores come, V's of even and of odd keys.
struct ChunkScales {
  alignas(64) float k[kChunksOfBlock][2][16], v[kChunksOfBlock][2][16];

  // Takes a block's and returns this, or null if the block has none.
  const ChunkScales* take(const BlockScales& block) {
    if (block.k == nullptr) return nullptr;
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    for (int64_t c = 0; c < kChunksOfBlock; ++c) {
      const auto load = [&](const float* of, int64_t i) { return _mm512_loadu_ps(of + c * kStep + i * 16); };
      _mm512_store_ps(k[c][0], without_four(load(block.k, 0), load(block.k, 1)));
      _mm512_store_ps(k[c][1], with_four(load(block.k, 0), load(block.k, 1)));
      _mm512_store_ps(v[c][0], _mm512_permutex2var_ps(load(block.v, 0), even, load(block.v, 1)));
      _mm512_store_ps(v[c][1], _mm512_permutex2var_ps(load(block.v, 0), odd, load(block.v, 1)));
    }
    return this;
  }
};

inline ChunkScores scaled(ChunkScores x, const ChunkScales& scales, int64_t chunk) {
  return {_mm512_mul_ps(x.without, _mm512_load_ps(scales.k[chunk][0])),
          _mm512_mul_ps(x.with, _mm512_load_ps(scales.k[chunk][1]))};
}

// Keys of the chunk from `begin` on that lie in [first, last).
inline __mmask32 keys_between(int64_t begin, int64_t first, int64_t last) {
  const int64_t low = smaller(larger(first - begin, 0), 32), high = smaller(larger(last - begin, 0), 32);
  return static_cast<__mmask32>(((uint64_t{1} << high) - 1) & ~((uint64_t{1} << low) - 1));
}

// The products of the seen keys' scores with `factor`, in the order of the keys, -inf in place of the others'.
struct Products {
  __m512 first, second;

  Products(ChunkScores x, __mmask32 seen, float factor) {
    const __m512 scale = _mm512_set1_ps(factor), none = _mm512_set1_ps(-__builtin_inff());
    const __m512i low = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    first = _mm512_permutex2var_ps(x.without, low, x.with);
    second = _mm512_permutex2var_ps(x.without, high, x.with);
    first = _mm512_mask_mul_ps(none, static_cast<__mmask16>(seen), first, scale);
    second = _mm512_mask_mul_ps(none, static_cast<__mmask16>(seen >> 16), second, scale);
  }
};

inline float highest_product(ChunkScores x, __mmask32 seen, float factor) {
  const Products p(x, seen, factor);
  return _mm512_reduce_max_ps(_mm512_max_ps(p.first, p.second));
}

// Weights of 32 keys by the top that `shift`, -top in units of the exponent, stands for; adds them to `total`.
// `scale`: of a score, in the same units; the scores carry K's scales, what is returned V's.
template <bool Masked, bool Scaled>
inline __attribute__((always_inline)) __m512i weigh_keys(ChunkScores x, __m512 scale, __m512 shift, __mmask32 seen,
                                                         const ChunkScales* scales, int64_t chunk, __m512& total) {
  const __m512i low = _mm512_cvtps_epi32(_mm512_fmadd_ps(x.without, scale, shift));
  const __m512i high = _mm512_cvtps_epi32(_mm512_fmadd_ps(x.with, scale, shift));
  __m512i weights = power_of_two(_mm512_packs_epi32(low, high));
  if constexpr (Masked) weights = _mm512_maskz_mov_epi16(seen, weights);
  __m512 even = even_floats(weights), odd = odd_floats(weights);
  total = _mm512_add_ps(total, _mm512_add_ps(even, odd));
  if constexpr (!Scaled) return weights;
  even = _mm512_mul_ps(even, _mm512_load_ps(scales->v[chunk][0]));
  odd = _mm512_mul_ps(odd, _mm512_load_ps(scales->v[chunk][1]));
  // Rounded to bfloat16, halves up.
  const auto rounded = [](__m512 v) {
    return _mm512_add_epi32(reinterpret_cast<__m512i>(v), _mm512_set1_epi32(0x8000));
  };
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  const __m512i both = _mm512_ternarylogic_epi32(rounded(odd), upper, _mm512_srli_epi32(rounded(even), 16), 0xea);
  return Masked ? _mm512_maskz_mov_epi16(seen, both) : both;  // what is not seen may have a scale that is no number
}

// Whether an operation since forget_invalid() had no number as its result: a score that is none is found so, because as an
// exponent it looks like any other. The weights must lie in memory by then.
inline bool was_invalid() {
  uint32_t flags;
  asm volatile("stmxcsr %0" : "=m"(flags) : : "memory");
  return (flags & 1) != 0;
}

inline void forget_invalid() {
  uint32_t flags;
  asm volatile("stmxcsr %0" : "=m"(flags) : : "memory");
  flags &= ~uint32_t{1};
  asm volatile("ldmxcsr %0" : : "m"(flags) : "memory");
}

// A row's scores over a block, of which it sees keys [first, last), numbered from the block's first; Scores gives those of a
// chunk.
template <typename Scores>
struct RowScores {
  const Scores& of_chunk;
  int64_t first, last;
  float factor;
  const ChunkScales* scales;  // or null

  int64_t first_chunk() const { return first / kStep; }
  int64_t end_chunk() const { return (last + kStep - 1) / kStep; }
  __mmask32 seen(int64_t chunk) const { return keys_between(chunk * kStep, first, last); }

  ChunkScores chunk(int64_t c) const { return scales == nullptr ? of_chunk(c) : scaled(of_chunk(c), *scales, c); }

  float top() const { return highest_product(chunk(first_chunk()), seen(first_chunk()), factor); }

  float highest() const {
    float x = -__builtin_inff();
    for (int64_t c = first_chunk(); c < end_chunk(); ++c) x = __builtin_fmaxf(x, highest_product(chunk(c), seen(c), factor));
    return x;
  }

  // Whether no product is NaN or infinity, and not all are minus infinity.
  bool are_numbers() const {
    __mmask16 wrong = 0, right = 0;
    const auto look = [&](__m512 x) {
      wrong |= _mm512_cmp_ps_mask(x, _mm512_set1_ps(__builtin_inff()), _CMP_NLT_UQ);
      right |= _mm512_cmp_ps_mask(x, _mm512_set1_ps(-__builtin_inff()), _CMP_GT_OQ);
    };
    for (int64_t c = first_chunk(); c < end_chunk(); ++c) {
      const Products p(chunk(c), seen(c), factor);
      look(p.first);
      look(p.second);
    }
    return wrong == 0 && right != 0;
  }

  // Writes the weights of all `chunks` chunks, place(c) on, and returns their sum.
  template <typename Place>
  float weigh(float top, int64_t chunks, const Place& place) const {
    const __m512 scale = _mm512_set1_ps(factor * kExponentUnit), shift = _mm512_set1_ps(-top * kExponentUnit);
    return weigh(chunks, place, [&](int64_t c) { return chunk(c); }, scale, shift);
  }

  // The same by the highest product of all: the other products are rounded as it is, so that they are not above it.
  template <typename Place>
  float weigh_by_highest(float top, int64_t chunks, const Place& place) const {
    const auto below_top = [&](int64_t c) -> ChunkScores {
      const ChunkScores x = chunk(c);
      const auto below = [&](__m512 score) {
        const __m512 product = _mm512_mul_round_ps(score, _mm512_set1_ps(factor), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        return _mm512_sub_ps(product, _mm512_set1_ps(top));
      };
      return {below(x.without), below(x.with)};
    };
    return weigh(chunks, place, below_top, _mm512_set1_ps(kExponentUnit), _mm512_setzero_ps());
  }

 private:
  template <typename Place, typename Chunk>
  float weigh(int64_t chunks, const Place& place, const Chunk& of, __m512 scale, __m512 shift) const {
    __m512 total = _mm512_setzero_ps();
    for (int64_t c = 0; c < chunks; ++c) {
      __m512i weights = _mm512_setzero_si512();
      if (c >= first_chunk() && c < end_chunk())
        weights = scales == nullptr ? weigh_keys<true, false>(of(c), scale, shift, seen(c), nullptr, c, total)
                                    : weigh_keys<true, true>(of(c), scale, shift, seen(c), scales, c, total);
      _mm512_storeu_si512(place(c), weights);
    }
    return _mm512_reduce_add_ps(total);
  }
};

// Weighs a row again where that is needed; a row with a score that is no number becomes NaN.
template <typename Scores, typename Place>
inline void again(const RowScores<Scores>& row, int64_t chunks, const Place& place, float& top, float& total) {
  if (!row.are_numbers()) {
    top = 0, total = __builtin_nanf("");
    for (int64_t c = 0; c < chunks; ++c) _mm512_storeu_si512(place(c), _mm512_setzero_si512());
    return;
  }
  const float highest = row.highest();
  if (total <= kMostTotal && __builtin_fabsf(top) <= kLargeTop && highest - top <= kFarAbove) return;
  top = highest;
  total = row.weigh_by_highest(top, chunks, place);
}

// Whether one of the rows, a multiple of 16, may have to be weighed again. Those that see no key have a total of 0.
inline bool any_again(const float* tops, const float* totals, int64_t count) {
  __mmask16 found = was_invalid() ? 1 : 0;
  for (int64_t i = 0; i < count; i += 16) {
    const __m512 total = _mm512_loadu_ps(totals + i), top = _mm512_abs_ps(_mm512_loadu_ps(tops + i));
    const __mmask16 sees = _mm512_cmp_ps_mask(total, _mm512_setzero_ps(), _CMP_NEQ_UQ);
    found |= _mm512_cmp_ps_mask(total, _mm512_set1_ps(kMostTotal), _CMP_NLE_UQ) |
        _mm512_mask_cmp_ps_mask(sees, top, _mm512_set1_ps(kLargeTop), _CMP_NLE_UQ);
  }
  return found != 0;
}

}  // namespace
}  // namespace kvforge
