// RMSNorm of one row, as model_defs.layers.RMSNorm rounds it. Used by files that are compiled once per instruction set.
#pragma once

#include "native/simd.h"

namespace {

// out = weight * bf16(x / sqrt(mean(x^2) + eps)), rounded again.
inline void rms_norm(const bf16* x, const bf16* weight, int64_t depth, float eps, bf16* out) {
  vfloat squares[4] = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= depth; i += 4 * kLanes)
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const vfloat v = load(x + i + j * kLanes);
      squares[j] += v * v;
    }
  float total = sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
  for (; i < depth; ++i) total += to_float(x[i]) * to_float(x[i]);
  const float scale = 1.0f / __builtin_sqrtf(total / static_cast<float>(depth) + eps);
  const auto normed = [&](int64_t at) {
    const vfloat unit = reinterpret_cast<vfloat>(round_to_bf16(load(x + at) * scale) & static_cast<int32_t>(0xffff0000));
    return round_to_bf16(unit * load(weight + at));
  };
  for (i = 0; i + 2 * kLanes <= depth; i += 2 * kLanes) store_upper(out + i, normed(i), normed(i + kLanes));
  for (; i < depth; ++i) out[i] = to_bf16(to_float(to_bf16(to_float(x[i]) * scale)) * to_float(weight[i]));
}

}  // namespace
