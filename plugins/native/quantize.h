// What cache writes make of a float32 vector: a scale, and its numbers in 8 or 4 bits.
// Used by files that are compiled once per instruction set: everything here has internal linkage.
#pragma once

#include <cstdint>
#include <type_traits>

#include "native/cast.h"

namespace {

constexpr float largest(fp8) { return 448.0f; }
constexpr float largest(int8_t) { return 127.0f; }
constexpr float largest(int4) { return 7.0f; }

// The scale that lets the largest of x just fit, at least the smallest normal float32; NaN if x holds one.
float dynamic_scale(const float* __restrict__ x, int64_t count, float largest) {
  int32_t highest = 0;  // magnitudes compare as integers, NaN above all
  for (int64_t i = 0; i < count; ++i) {
    const int32_t magnitude = static_cast<int32_t>(to_bits(x[i]) & 0x7fffffff);
    highest = magnitude > highest ? magnitude : highest;
  }
  const float scale = from_bits(static_cast<uint32_t>(highest)) / largest;
  return scale < 0x1p-126f ? 0x1p-126f : scale;
}

template <typename Target>
void quantize(const float* __restrict__ x, float scale, Target* __restrict__ out, int64_t count) {
  constexpr float limit = largest(Target{});
  const auto bounded = [&](int64_t i) {
    const float scaled = x[i] / scale;
    const float low = scaled < -limit ? -limit : scaled;  // a NaN stays a NaN
    return low > limit ? limit : low;
  };
  if constexpr (std::is_same_v<Target, int4>)
    for (int64_t i = 0; i < count; i += 2) out[i / 2] = to_int4(bounded(i), bounded(i + 1));
  else
    for (int64_t i = 0; i < count; ++i) store(out + i, bounded(i));
}

}  // namespace
