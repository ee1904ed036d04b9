// How a group of int4 weights lies: chunks of codes, then steps, or scales and perhaps zero points.
// Used by files that are compiled once per instruction set: everything here has internal linkage.
#pragma once

#include "packed_linear/cpu_kernel.h"

namespace kvforge {
namespace {

// What a group of the weights has besides its codes.
enum class Scales { steps, halves, halves_and_zeros };

constexpr int64_t group_bytes(Scales s) {
  return s == Scales::steps ? kInt4GroupBytes : s == Scales::halves ? kInt4ScalesGroupBytes : kInt4ZerosGroupBytes;
}

constexpr int64_t kChunkDepth = 8;  // codes of an output in one word of the weights
constexpr int64_t kChunkBytes = kPanel * kChunkDepth / 2;
constexpr int64_t kChunks = kInt4GroupDepth / kChunkDepth;
constexpr int64_t kScalesOffset = kChunks * kChunkBytes, kZerosOffset = kScalesOffset + kPanel * 2;
constexpr int32_t kMiddle = 8;  // the zero point where groups have none of their own, which the sum is multiplied with

static_assert(kScalesOffset + kPanel == kInt4GroupBytes && kZerosOffset == kInt4ScalesGroupBytes);
static_assert(kZerosOffset + kPanel == kInt4ZerosGroupBytes);

}  // namespace
}  // namespace kvforge
