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
inline void rotate_heads(float* x, int64_t dim) {
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

}  // namespace
