// What the operator hands to the kernel; the kernel is compiled once per instruction set.
#pragma once

#include <cstdint>

namespace kvforge {

constexpr int64_t kConvBlock = 256;  // channels of a task
constexpr int64_t kConvTokens = 8;  // whose inputs and results stay in the first cache

struct ShortConv {
  const void* x;  // [T, channels], in elements; rows `token_stride` apart
  int64_t token_stride;
  const void* weight;  // [width, channels], contiguous, as the pool and the result are
  bool is_bf16;
  const int32_t* query_start;
  const int32_t* state_read;  // checked against the pool
  const int32_t* state_write;
  void* pool;  // [rows, width - 1, channels]
  void* out;  // [T, channels]
  int64_t width, channels;
  bool activates;  // SiLU behind the sums
  const void* bias;  // [channels]; none where it is null
};

// Floats of scratch that a task needs.
constexpr int64_t conv_scratch(int64_t width) { return 2 * (width + kConvTokens) * kConvBlock; }

// Channels [first, first + kConvBlock), as far as there are, of all tokens of a sequence.
namespace isa_portable { void convolve(const ShortConv& args, int64_t sequence, int64_t first, float* scratch); }
#if defined(__x86_64__)
namespace isa_avx2 { void convolve(const ShortConv& args, int64_t sequence, int64_t first, float* scratch); }
namespace isa_avx512 { void convolve(const ShortConv& args, int64_t sequence, int64_t first, float* scratch); }
#endif

}  // namespace kvforge
