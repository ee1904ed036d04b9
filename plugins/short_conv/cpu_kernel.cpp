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

// The inputs of the last tokens stand in a ring: that of token t, from the sequence's first on, in row t mod width.
template <typename Element>
void run(const ShortConv& a, int64_t sequence, int64_t first, float* scratch) {
  const int64_t count = a.channels - first < kConvBlock ? a.channels - first : kConvBlock, width = a.width;
  const int64_t begin = a.query_start[sequence], end = a.query_start[sequence + 1], kept = width - 1;
  float *weight = scratch, *ring = weight + width * kConvBlock, *result = ring + width * kConvBlock;
  float* bias = result + kConvBlock;
  for (int64_t i = 0; i < conv_scratch(width); ++i) scratch[i] = 0.0f;
  for (int64_t j = 0; j < width; ++j)
    widen(static_cast<const Element*>(a.weight) + j * a.channels + first, weight + j * kConvBlock, count);
  if (a.bias != nullptr) widen(static_cast<const Element*>(a.bias) + first, bias, count);
  Element* pool = static_cast<Element*>(a.pool);
  if (a.state_read[sequence] >= 0)
    for (int64_t j = 0; j < kept; ++j)
      widen(pool + (a.state_read[sequence] * kept + j) * a.channels + first, ring + (j + 1) * kConvBlock, count);
  for (int64_t t = begin; t < end; ++t) {
    const int64_t place = (t - begin) % width;
    widen(static_cast<const Element*>(a.x) + t * a.token_stride + first, ring + place * kConvBlock, count);
    for (int64_t c = 0; c < count; c += kLanes) {
      vfloat sum = load(bias + c);
      for (int64_t j = 0; j < width; ++j) {
        const int64_t row = place + 1 + j < width ? place + 1 + j : place + 1 + j - width;
        sum += load(ring + row * kConvBlock + c) * load(weight + j * kConvBlock + c);
      }
      store(result + c, a.activates ? silu(sum) : sum);
    }
    narrow(result, static_cast<Element*>(a.out) + t * a.channels + first, count);
    if (a.state_write[t] < 0) continue;
    for (int64_t j = 0; j < kept; ++j)
      narrow(ring + (place + 2 + j) % width * kConvBlock,
             pool + (a.state_write[t] * kept + j) * a.channels + first, count);
  }
}

}  // namespace

namespace KVFORGE_ISA {

void convolve(const ShortConv& args, int64_t sequence, int64_t first, float* scratch) {
  args.is_bf16 ? run<bf16>(args, sequence, first, scratch) : run<float>(args, sequence, first, scratch);
}

}  // namespace KVFORGE_ISA
}  // namespace kvforge
