// Products of rows with 32 lines of a matrix, which is in tiles. A row's sums are made in the order of the columns,
// whatever rows are beside it. Compiled once per instruction set: everything here has internal linkage.
#pragma once

#include <type_traits>

#include "grouped_attention/cpu_arithmetic.h"

namespace kvforge {
namespace {

#if defined(__AVX512F__)
constexpr int kMaxRows = 8;  // whose sums are held in registers
#elif defined(__AVX2__)
constexpr int kMaxRows = 2;
#else
constexpr int kMaxRows = 1;
#endif

// Calls body(row, count) for as many rows at once as there are.
template <typename Body>
inline __attribute__((always_inline)) void in_row_groups(int64_t rows, const Body& body) {
  int64_t r = 0;
  if constexpr (kMaxRows >= 8)
    for (; r + 8 <= rows; r += 8) body(r, std::integral_constant<int, 8>());
  if constexpr (kMaxRows >= 4)
    for (; r + 4 <= rows; r += 4) body(r, std::integral_constant<int, 4>());
  if constexpr (kMaxRows >= 2)
    for (; r + 2 <= rows; r += 2) body(r, std::integral_constant<int, 2>());
  for (; r < rows; ++r) body(r, std::integral_constant<int, 1>());
}

// Adds the products of Rows rows of terms, `stride` apart, with the 16 columns of two tiles, one below the other: of codes
// of so many bits, or of exact numbers.
template <int Rows, int Bits>
inline __attribute__((always_inline)) void add_tiles(vfloat (&sums)[Rows][kVectors], const char* upper,
                                                     const char* lower, const Term* terms, int64_t stride) {
  constexpr bool kExact = Bits == kExactBits;
  constexpr int kWords = kExact ? 1 : Bits / 2, kOfWord = kProducts / kWords;
  vint words[kVectors], high[kVectors] = {};
#pragma GCC unroll 16
  for (int i = 0; i < kProducts; ++i) {
    if constexpr (!kExact)
      if (i % kOfWord == 0)
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
          const char* tile = v < kPerTile ? upper : lower;
          words[v] = load_words(tile + i / kOfWord * kTileSide * 4 + place_of(v));
          if constexpr (Bits == 3) high[v] = load_bits(tile + kTileSide * 4 + place_of(v) / 2);
        }
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      Operand x;
      if constexpr (kExact) x = load_operand((v < kPerTile ? upper : lower) + i * kTileSide * 4 + place_of(v));
      else x = unpack<Bits>(words[v], high[v], i % kOfWord);
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r) sums[r][v] = add_product(sums[r][v], x, terms + r * stride, i);
    }
  }
}

}  // namespace
}  // namespace kvforge
