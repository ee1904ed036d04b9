// For files that are compiled once per instruction set, as native/simd.h.
#pragma once

#include "native/simd.h"

namespace {

// log(1 + e^x), by the series of 2 atanh(u / (2 + u)) = log(1 + u) for u = e^-|x|.
inline vfloat softplus_of(vfloat x) {
  const vfloat positive = x > 0.0f ? x : vfloat{}, u = exp_nonpositive(x > 0.0f ? -x : x);
  const vfloat s = u / (u + 2.0f), z = s * s;
  vfloat sum = broadcast(1.0f / 17);
  for (int64_t n = 15; n > 0; n -= 2) sum = sum * z + 1.0f / n;
  return positive + 2.0f * s * sum;
}

}  // namespace
