// The convolution of a block of channels. Compiled once per instruction set into namespace KVFORGE_ISA, so no inline
// function with external linkage may be used here: the linker would keep one variant of it.
#include "short_conv/cpu_kernel.h"

#include "native/rows.h"
#include "native/simd.h"

namespace kvforge {
namespace {

inline vfloat silu(vfloat x) {
  const vfloat negative = x < 0.0f ? x : -x;
  const vfloat e = exp_nonpositive(negative);
  return x * (x < 0.0f ? e : broadcast(1.0f)) / (e + 1.0f);
}

// Inputs stand in a window: those before a chunk's tokens, then these. kWidth is the width, 0 for one that is not known.
template <typename Element, int64_t kWidth>
void run(const ShortConv& a, int64_t sequence, int64_t first, float* scratch) {
  const int64_t count = a.channels - first < kConvBlock ? a.channels - first : kConvBlock;
  const int64_t width = kWidth > 0 ? kWidth : a.width, kept = width - 1;
  float *weight = scratch, *bias = weight + width * kConvBlock, *window = bias + kConvBlock;
  float* results = window + (kept + kConvTokens) * kConvBlock;
  const int64_t cleared = count < kConvBlock ? conv_scratch(width) : 2 * width * kConvBlock;
  for (int64_t i = 0; i < cleared; ++i) scratch[i] = 0.0f;
  for (int64_t j = 0; j < width; ++j)
    widen(static_cast<const Element*>(a.weight) + j * a.channels + first, weight + j * kConvBlock, count);
  if (a.bias != nullptr) widen(static_cast<const Element*>(a.bias) + first, bias, count);
  Element* pool = static_cast<Element*>(a.pool);
  if (a.state_read[sequence] >= 0)
    for (int64_t j = 0; j < kept; ++j)
      widen(pool + (a.state_read[sequence] * kept + j) * a.channels + first, window + j * kConvBlock, count);
  const int64_t end = a.query_start[sequence + 1];
  for (int64_t t = a.query_start[sequence]; t < end; t += kConvTokens) {
    const int64_t tokens = end - t < kConvTokens ? end - t : kConvTokens;
    for (int64_t k = 0; k < tokens; ++k)
      widen(static_cast<const Element*>(a.x) + (t + k) * a.token_stride + first, window + (kept + k) * kConvBlock, count);
    for (int64_t c = 0; c < count; c += kLanes)
      for (int64_t k = 0; k < tokens; ++k) {
        vfloat sum = load(bias + c);
        for (int64_t j = 0; j < width; ++j)
          sum += load(window + (k + j) * kConvBlock + c) * load(weight + j * kConvBlock + c);
        store(results + k * kConvBlock + c, a.activates ? silu(sum) : sum);
      }
    for (int64_t k = 0; k < tokens; ++k) {
      narrow(results + k * kConvBlock, static_cast<Element*>(a.out) + (t + k) * a.channels + first, count);
      if (a.state_write[t + k] < 0) continue;
      for (int64_t j = 0; j < kept; ++j)
        narrow(window + (k + 1 + j) * kConvBlock,
               pool + (a.state_write[t + k] * kept + j) * a.channels + first, count);
    }
    for (int64_t i = 0; t + tokens < end && i < kept * kConvBlock; ++i) window[i] = window[tokens * kConvBlock + i];
  }
}

template <typename Element>
void run(const ShortConv& a, int64_t sequence, int64_t first, float* scratch) {
  a.width == 4 ? run<Element, 4>(a, sequence, first, scratch) : run<Element, 0>(a, sequence, first, scratch);
}

}  // namespace

namespace KVFORGE_ISA {

void convolve(const ShortConv& args, int64_t sequence, int64_t first, float* scratch) {
  args.is_bf16 ? run<bf16>(args, sequence, first, scratch) : run<float>(args, sequence, first, scratch);
}

}  // namespace KVFORGE_ISA
}  // namespace kvforge
