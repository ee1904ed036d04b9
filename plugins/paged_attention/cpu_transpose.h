// Transposition of words. For files compiled for AVX-512; everything here has internal linkage.
#pragma once

#include <immintrin.h>

namespace kvforge {
namespace {

// Transposes 16 x 16 words: x[i] word j becomes x[j] word i.
inline void transpose(__m512i x[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    x[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    x[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    x[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    x[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i)
    for (int half = 0; half < 16; half += 8) {
      t[half + i] = _mm512_shuffle_i32x4(x[half + i], x[half + i + 4], 0x88);
      t[half + i + 4] = _mm512_shuffle_i32x4(x[half + i], x[half + i + 4], 0xdd);
    }
  for (int i = 0; i < 8; ++i) {
    x[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    x[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
  }
}

}  // namespace
}  // namespace kvforge
