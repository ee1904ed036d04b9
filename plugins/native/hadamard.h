// The rotation of cached vectors, with the bits of plugins/kv_rotation.py. Used by files that are compiled once per
// instruction set: everything here has internal linkage.
#pragma once

#include "native/simd.h"

namespace {

// Sums and differences of the lanes that are `stride` apart. A product with 1 or -1 is exact, contracted or not.
template <int stride>
inline vfloat add_pairs(vfloat x) {
  const vfloat other = __builtin_shuffle(x, iota() ^ stride);
  const vfloat sign = (iota() & stride) != 0 ? broadcast(-1.0f) : broadcast(1.0f);
  return other + x * sign;
}

// Adds pairs by strides from `stride` on in a block of `size` numbers.
inline void add_distant_pairs(float* x, int64_t size, int64_t stride) {
  for (; stride < size; stride *= 2)
    for (int64_t begin = 0; begin < size; begin += 2 * stride)
      for (int64_t i = begin; i < begin + stride; ++i) {
        const float first = x[i], second = x[i + stride];
        x[i] = first + second;
        x[i + stride] = first - second;
      }
}

// Multiplies each block of x, as many numbers as the largest power of two that divides `dim`, with a normed Hadamard
// matrix, in place.
inline void rotate_blocks(float* x, int64_t dim) {
  const int64_t size = dim & -dim;
  const float factor = static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(size)));
  const bool in_vectors = size % kLanes == 0;
  for (float* block = x; block < x + dim; block += size) {
    for (int64_t i = 0; in_vectors && i < size; i += kLanes) {
      vfloat lanes = add_pairs<2>(add_pairs<1>(load(block + i)));
      if constexpr (kLanes > 4) lanes = add_pairs<4>(lanes);
      if constexpr (kLanes > 8) lanes = add_pairs<8>(lanes);
      store(block + i, lanes);
    }
    add_distant_pairs(block, size, in_vectors ? kLanes : 1);
    for (int64_t i = 0; i < size; ++i) block[i] *= factor;
  }
}

constexpr int64_t kLargestRowBlock = 256;

// out = a block of `vectors` vectors of x times a normed Hadamard matrix, rounded to bfloat16.
template <int vectors>
inline void rotate_vectors(const bf16* x, float factor, bf16* out) {
  vfloat v[vectors];
#pragma GCC unroll 64
  for (int i = 0; i < vectors; ++i) {
    v[i] = add_pairs<2>(add_pairs<1>(load(x + i * kLanes)));
    if constexpr (kLanes > 4) v[i] = add_pairs<4>(v[i]);
    if constexpr (kLanes > 8) v[i] = add_pairs<8>(v[i]);
  }
#pragma GCC unroll 8
  for (int stride = 1; stride < vectors; stride *= 2)
#pragma GCC unroll 64
    for (int i = 0; i < vectors; ++i)
      if ((i & stride) == 0) {
        const vfloat first = v[i], second = v[i + stride];
        v[i] = first + second;
        v[i + stride] = first - second;
      }
  if constexpr (vectors == 1) return store_upper(out, round_to_bf16(v[0] * factor));
#pragma GCC unroll 64
  for (int i = 0; i + 1 < vectors; i += 2)
    store_upper(out + i * kLanes, round_to_bf16(v[i] * factor), round_to_bf16(v[i + 1] * factor));
}

// out = x in blocks of the largest power of two that divides `dim`, at most kLargestRowBlock, times normed Hadamard
// matrices, with the bits of rotate_blocks(), rounded to bfloat16. out may be x.
inline void rotate_row(const bf16* x, int64_t dim, bf16* out) {
  const int64_t power = dim & -dim, size = power < kLargestRowBlock ? power : kLargestRowBlock;
  const float factor = static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(size)));
  for (int64_t begin = 0; begin < dim; begin += size) {
    switch (size) {
      case 256: rotate_vectors<256 / kLanes>(x + begin, factor, out + begin); break;
      case 128: rotate_vectors<128 / kLanes>(x + begin, factor, out + begin); break;
      case 64: rotate_vectors<64 / kLanes>(x + begin, factor, out + begin); break;
      case 32: rotate_vectors<32 / kLanes>(x + begin, factor, out + begin); break;
      case 16: rotate_vectors<16 / kLanes>(x + begin, factor, out + begin); break;
      default: {
        float block[16];
        for (int64_t i = 0; i < size; ++i) block[i] = to_float(x[begin + i]);
        add_distant_pairs(block, size, 1);
        for (int64_t i = 0; i < size; ++i) out[begin + i] = to_bf16(block[i] * factor);
      }
    }
  }
}

}  // namespace
