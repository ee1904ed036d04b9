// Packed weights as they come from Python, and the kernel for them on this machine.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>

#include "packed_linear/cpu_kernel.h"

namespace kvforge {

// What the weights are, and for int4 what their groups have besides codes: steps, scales, scales and zero points.
enum class Weights { bf16, int8, int4, int4_scales, int4_zeros };

// The kernel for a product of so many rows.
const LinearKernel& linear_kernel(Weights weights, int64_t rows);

Weights weights_of(const char* op, const at::Tensor& weight);

int64_t num_groups(Weights weights, int64_t depth);

// A packed weight for x of `depth` columns; `stack` are the dimensions before its own: of how many it is one.
void check_weight(const char* op, const at::Tensor& weight, Weights weights, at::IntArrayRef stack, int64_t depth,
                  int64_t panels);

// The shape of the scales of an int8 or int4 weight.
inline std::array<int64_t, 2> scales_shape(Weights weights, int64_t panels) {
  return {weights == Weights::int8 ? 2 : 1, panels * kPanel};
}

}  // namespace kvforge
