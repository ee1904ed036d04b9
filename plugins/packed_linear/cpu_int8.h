// What all int8 kernels share: a row is quantized by its largest magnitude and stored plus 128, a sum of products is
// scaled back. Used by files that are compiled once per instruction set.
#pragma once

#include "packed_linear/cpu_kernel.h"
#include "packed_linear/cpu_norm.h"

namespace kvforge {
namespace {

// max|x| / 127, at least the smallest normal number; not finite if the row is not. largest: bits of max|x| in bf16.
inline float row_scale(uint32_t largest) {
  const float scale = from_bits(largest << 16) / 127.0f;
  return scale < 0x1p-126f ? 0x1p-126f : scale;
}

// float(sum - 128 * sum of weights) * scale_of(row) * scale of the output: exact up to the conversion.
template <typename ScaleOf>
inline void dequantize_rows(const LinearArgs& a, int64_t num_rows, int64_t panel, void* sums, const ScaleOf& scale_of) {
  const float* scales = a.weight_scales + panel * kPanel;
  vint shift[kPanel / kLanes];
  for (int64_t j = 0; j < kPanel / kLanes; ++j)
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
