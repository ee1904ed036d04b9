// In what numbers products are made: pairs of bfloat16 on AVX512-BF16, else float32. A *term* is what the 16 columns of a
// tile are multiplied with; a product takes one of them, or a pair. Compiled once per instruction set: everything here has
// internal linkage.
#pragma once

#include "native/sealed_layout.h"
#include "native/simd.h"
#if defined(__AVX512BF16__)
#include "paged_attention/cpu_bf16.h"
#else
#include "paged_attention/cpu_fp32.h"
#endif

namespace kvforge {
namespace {

constexpr int kExactBits = 0;                  // in place of a code's: the numbers are exact
constexpr int kVectors = kGroup / kLanes;      // of 32 lines
constexpr int kPerTile = kTileSide / kLanes;   // vectors of a tile's lines

// Bytes to the lines of vector v in a tile whose lines are words.
inline int64_t place_of(int v) { return v % kPerTile * kLanes * 4; }

inline vint load_words(const char* p) {
  vint x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

// The words of lines of 16 columns, one bit of each: the even columns' in their lower halves, the odd ones' in the upper.
inline vint load_bits(const char* p) {
  vbf16 x;
  std::memcpy(&x, p, sizeof x);
  const vint bits = __builtin_convertvector(x, vint);
  return (bits & 0xff) | bits >> 8 << 16;
}

// float16 as float32.
inline vfloat load_half(const uint16_t* p) {
#if defined(__AVX512F__)
  return reinterpret_cast<vfloat>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#else
  vbf16 x;
  std::memcpy(&x, p, sizeof x);
  const vint bits = __builtin_convertvector(x, vint), magnitude = bits & 0x7fff;
  vint value = reinterpret_cast<vint>(reinterpret_cast<vfloat>(magnitude << 13) * 0x1p112f);
  value = magnitude < 0x7c00 ? value : 0x7f800000 | (magnitude << 13);
  return reinterpret_cast<vfloat>(value | (bits & 0x8000) << 16);
#endif
}

#if defined(__AVX512BF16__)

using Term = bf16;
using Operand = __m512i;
constexpr int kProducts = 8;  // of a tile, of its columns 2 i and 2 i + 1

// bfloat16 of code - middle for each value of five bits, of which a code is the lowest.
template <int Bits>
struct Numbers {
  uint16_t of[32] = {};
  constexpr Numbers() {
    for (int code = 0; code < 32; ++code) {
      const int twice = 2 * (code % (1 << Bits)) - ((1 << Bits) - 1), size = twice < 0 ? -twice : twice;
      int power = 0;
      while (2 << power <= size) ++power;
      of[code] = static_cast<uint16_t>((twice < 0) << 15 | (126 + power) << 7 | (size << (7 - power) & 0x7f));
    }
  }
};

template <int Bits>
alignas(64) constexpr Numbers<Bits> kNumbers;

// The numbers of the i-th codes of both halves of words; of codes of 3 bits `high` has the highest.
template <int Bits>
inline Operand unpack(vint words, vint high, int i) {
  __m512i codes = _mm512_srli_epi16(reinterpret_cast<__m512i>(words), (Bits == 3 ? 2 : Bits) * i);
  if constexpr (Bits == 3) {
    const __m512i bits = reinterpret_cast<__m512i>(high);
    const __m512i third = i < 2 ? _mm512_slli_epi16(bits, i < 2 ? 2 - i : 0) : _mm512_srli_epi16(bits, i < 2 ? 0 : i - 2);
    codes = _mm512_ternarylogic_epi32(_mm512_set1_epi16(3), codes, third, 0xca);  // where there is a 1, codes, else third
  }
  return _mm512_permutexvar_epi16(codes, _mm512_load_si512(kNumbers<Bits>.of));
}

inline vfloat add_product(vfloat sum, Operand x, const Term* terms, int i) {
  int32_t pair;
  std::memcpy(&pair, terms + 2 * i, sizeof pair);
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(x), reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair)));
}

inline Operand load_operand(const char* p) { return _mm512_loadu_si512(p); }

inline void store_terms(Term* out, const vfloat x[kVectors]) {
  _mm512_storeu_si512(out, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(x[1], x[0])));
}

// Turns scores[0 .. width) into weights, 2^(x - top) for [first, last) and 0 elsewhere, where x is score * scale * log2(e)
// and top the largest of these. Returns their sum. width is a multiple of 16, first < last.
template <bool Masked>
inline float softmax(float* scores, int64_t width, int64_t first, int64_t last, float scale, float* top) {
  const __m512 factor = _mm512_set1_ps(scale * kLog2E);
  const auto seen = [&](int64_t j) -> __mmask16 { return Masked ? lanes_between(j, first, last) : 0xffff; };
  __m512 highest = _mm512_set1_ps(-__builtin_inff());
  for (int64_t j = 0; j < width; j += 16)
    highest = _mm512_mask_max_ps(highest, seen(j), highest, _mm512_mul_ps(_mm512_loadu_ps(scores + j), factor));
  *top = _mm512_reduce_max_ps(highest);
  const __m512 peak = _mm512_set1_ps(*top);
  __m512 total = _mm512_setzero_ps();
  for (int64_t j = 0; j < width; j += 16) {
    const __m512 weight = _mm512_maskz_mov_ps(seen(j), weight_of(_mm512_loadu_ps(scores + j), factor, peak));
    total = _mm512_add_ps(total, weight);
    _mm512_storeu_ps(scores + j, weight);
  }
  return _mm512_reduce_add_ps(total);
}

__attribute__((noinline)) float softmax_row(float* scores, int64_t width, int64_t first, int64_t last, float scale,
                                            float* top) {
  if (first == 0 && last == width) return softmax<false>(scores, width, first, last, scale, top);
  return softmax<true>(scores, width, first, last, scale, top);
}

#else

using Term = float;
using Operand = vfloat;
constexpr int kProducts = 16;

template <int Bits>
inline Operand unpack(vint words, vint high, int i) {
  constexpr int kCodes = 1 << Bits;
  constexpr float kMiddle = (kCodes - 1) / 2.0f;
  vint codes = words >> (16 * (i % 2) + i / 2 * (Bits == 3 ? 2 : Bits));
  if constexpr (Bits == 3) codes = (codes & 3) | (high >> (16 * (i % 2) + i / 2) & 1) << 2;
#if defined(__AVX2__)
  if constexpr (kCodes <= kLanes) {
    vfloat numbers;  // by the lowest bits
    for (int lane = 0; lane < kLanes; ++lane) numbers[lane] = static_cast<float>(lane % kCodes) - kMiddle;
    return __builtin_shuffle(numbers, codes);
  }
#endif
  return __builtin_convertvector(codes & (kCodes - 1), vfloat) - kMiddle;
}

inline vfloat add_product(vfloat sum, Operand x, const Term* terms, int i) { return sum + x * terms[i]; }

inline Operand load_operand(const char* p) { return load(reinterpret_cast<const float*>(p)); }

inline void store_terms(Term* out, const vfloat x[kVectors]) {
  for (int v = 0; v < kVectors; ++v) store(out + v * kLanes, x[v]);
}

using RowSums = KVFORGE_ISA::Fp32RowSums;

inline void add_block(RowSums& row, const float* sums, float top, float total, int64_t dim) {
  KVFORGE_ISA::fp32_add_block(row, sums, top, total, dim);
}

inline float softmax_row(float* scores, int64_t width, int64_t first, int64_t last, float scale, float* top) {
  return KVFORGE_ISA::fp32_softmax_row(scores, width, first, last, scale, nullptr, nullptr, top);
}

#endif

constexpr int64_t kPlainTile = kProducts * kTileSide * 4;  // bytes of a tile of exact numbers: its operands in turn

}  // namespace
}  // namespace kvforge
