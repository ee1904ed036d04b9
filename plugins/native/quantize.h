// What cache writes make of a float32 vector: a scale, and its numbers in 8 or 4 bits.
// Used by files that are compiled once per instruction set: everything here has internal linkage.
#pragma once

#include <cstdint>
#include <cstring>
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
  if constexpr (std::is_same_v<Target, int4>) {
    constexpr int64_t kBlock = 64;
    for (int64_t begin = 0; begin < count; begin += kBlock) {  // bytes first, which the compiler makes many of at once
      const int64_t size = count - begin < kBlock ? count - begin : kBlock;
      int8_t codes[kBlock];
      uint16_t pairs[kBlock / 2];
      for (int64_t i = 0; i < size; ++i) codes[i] = to_int8(bounded(begin + i));
      std::memcpy(pairs, codes, size);
      for (int64_t i = 0; i < size / 2; ++i)
        out[begin / 2 + i] = {static_cast<uint8_t>((pairs[i] & 0x0f) | (pairs[i] >> 4 & 0xf0))};
    }
  } else {
    for (int64_t i = 0; i < count; ++i) store(out + i, bounded(i));
  }
}

}  // namespace
