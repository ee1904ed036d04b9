// What all int8 kernels share: a row is quantized by its largest magnitude and stored plus 128, a sum of products is
// scaled back. Used by files that are compiled once per instruction set.
#pragma once

#include "packed_linear/cpu_kernel.h"
#include "native/hadamard.h"
#include "packed_linear/cpu_norm.h"

namespace kvforge {
namespace {

// max|x| / 127, at least the smallest normal number; not finite if the row is not. largest: bits of max|x| in bf16.
inline float row_scale(uint32_t largest) {
  const float scale = from_bits(largest << 16) / 127.0f;
  return scale < 0x1p-126f ? 0x1p-126f : scale;
}

// The row x as it is quantized: normed and rotated where it is to be. changed: depth elements.
inline const bf16* row_to_quantize(const LinearArgs& a, const bf16* x, bf16* changed) {
  if (a.norm != nullptr) rms_norm(x, a.norm, a.depth, a.eps, changed);
  const bf16* const normed = a.norm != nullptr ? changed : x;
  if (!a.rotated) return normed;
  rotate_row(normed, a.depth, changed);
  return changed;
}

// Writes the quantized values plus 128 and returns the scale.
template <typename Element>
float quantize_row_plainly(const bf16* x, int64_t depth, Element* out) {
  uint32_t largest = 0;  // bits of |x| are ordered as |x| is, NaN last
  for (int64_t i = 0; i < depth; ++i) {
    const uint32_t magnitude = x[i] & 0x7fffu;
    largest = magnitude > largest ? magnitude : largest;
  }
  const float scale = row_scale(largest);
  for (int64_t i = 0; i < depth; ++i) out[i] = static_cast<uint8_t>(to_int8(to_float(x[i]) / scale)) ^ 0x80;
  return scale;
}

// float(sum - 128 * sum of weights) * scale_of(row) * scale of the output: exact up to the conversion. Without sums of the
// weights nothing is taken off.
template <typename ScaleOf>
inline void dequantize_rows(const LinearArgs& a, int64_t num_rows, int64_t panel, void* sums, const ScaleOf& scale_of) {
  const float* scales = a.weight_scales + panel * kPanel;
  vint shift[kPanel / kLanes] = {};
  for (int64_t j = 0; a.weight_sums != nullptr && j < kPanel / kLanes; ++j)
    shift[j] = 128 * __builtin_convertvector(load(a.weight_sums + panel * kPanel + j * kLanes), vint);
  for (int64_t r = 0; r < num_rows; ++r) {
    const float scale = scale_of(r);
    float* row = static_cast<float*>(sums) + r * kPanel;
    for (int64_t j = 0; j < kPanel / kLanes; ++j) {
      const vint sum = reinterpret_cast<vint>(load(row + j * kLanes)) - shift[j];
      store(row + j * kLanes, __builtin_convertvector(sum, vfloat) * scale * load(scales + j * kLanes));
    }
  }
}

}  // namespace
}  // namespace kvforge
