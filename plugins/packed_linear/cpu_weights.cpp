// Which kernel multiplies which packed weight, and what shape that has.
#include "packed_linear/cpu_weights.h"

#include <c10/util/Exception.h>

#include <array>
#include <vector>

#include "native/isa.h"

namespace kvforge {
namespace {

constexpr int64_t kFewRowsOfInt8 = 8, kFewRowsOfInt4 = 12;
constexpr int64_t kLargestIntegerDepth = 1 << 16;  // int32 sums of products up to 255 * 127 do not overflow

// The kernels for each of Weights.
using Kernels = std::array<const LinearKernel*, 5>;

#define KVFORGE_KERNELS(bf16_isa, int8_isa, int4_isa, scales_isa)                              \
  Kernels {                                                                                    \
    &bf16_isa::linear_bf16_kernel, &int8_isa::linear_int8_kernel, &int4_isa::linear_int4_kernel, \
        &scales_isa::linear_int4_scales_kernel, &scales_isa::linear_int4_zeros_kernel          \
  }

// With AMX, quantized weights meet few rows in the kernels of AVX512-VNNI, whose sums are the same integers: what bounds
// them is reading, which on Intel's CPUs goes up to three times as fast where instructions fetch what comes next
// (kFetchesInOrder). Groups of int4 that have scales of their own are too short for tiles.
Kernels kernels(int64_t rows) {
#if defined(__x86_64__)
  if (const Tiles tiles = current_tiles(); tiles != Tiles::none) {
    Kernels kernels = tiles == Tiles::software
        ? KVFORGE_KERNELS(isa_amx_software, isa_amx_software, isa_amx_software, isa_avx512_vnni)
        : KVFORGE_KERNELS(isa_amx, isa_amx, isa_amx, isa_avx512_vnni);
    if (rows <= kFewRowsOfInt8) kernels[static_cast<size_t>(Weights::int8)] = &isa_avx512_vnni::linear_int8_kernel;
    if (rows <= kFewRowsOfInt4) kernels[static_cast<size_t>(Weights::int4)] = &isa_avx512_vnni::linear_int4_kernel;
    return kernels;
  }
  switch (current_isa()) {
    case Isa::avx512_bf16:
      return KVFORGE_KERNELS(isa_avx512_bf16, isa_avx512_bf16, isa_avx512_bf16, isa_avx512_bf16);
    case Isa::avx512_vnni: return KVFORGE_KERNELS(isa_avx512, isa_avx512_vnni, isa_avx512_vnni, isa_avx512_vnni);
    case Isa::avx512: return KVFORGE_KERNELS(isa_avx512, isa_avx512, isa_avx512, isa_avx512);
    case Isa::avx2: return KVFORGE_KERNELS(isa_avx2, isa_avx2, isa_avx2, isa_avx2);
    case Isa::portable: break;
  }
#endif
  return KVFORGE_KERNELS(isa_portable, isa_portable, isa_portable, isa_portable);
}

int64_t int4_group_bytes(Weights weights) {
  switch (weights) {
    case Weights::int4: return kInt4GroupBytes;
    case Weights::int4_scales: return kInt4ScalesGroupBytes;
    default: return kInt4ZerosGroupBytes;
  }
}

}  // namespace

const LinearKernel& linear_kernel(Weights weights, int64_t rows) {
  return *kernels(rows)[static_cast<size_t>(weights)];
}

Weights weights_of(const char* op, const at::Tensor& weight) {
  switch (weight.scalar_type()) {
    case at::kBFloat16: return Weights::bf16;
    case at::kChar: return Weights::int8;
    case at::kByte: {
      const int64_t bytes = weight.dim() >= 3 ? weight.size(-1) : 0;
      return bytes == kInt4ZerosGroupBytes ? Weights::int4_zeros
          : bytes == kInt4ScalesGroupBytes ? Weights::int4_scales
                                           : Weights::int4;
    }
    default: TORCH_CHECK(false, op, ": weight must be bfloat16, int8 or uint8, not ", weight.scalar_type());
  }
}

int64_t num_groups(Weights weights, int64_t depth) {
  const int64_t group_depth = weights == Weights::bf16 ? 2 : weights == Weights::int8 ? 4 : kInt4GroupDepth;
  return (depth - 1) / group_depth + 1;
}

void check_weight(const char* op, const at::Tensor& weight, Weights weights, at::IntArrayRef stack, int64_t depth,
                  int64_t panels) {
  std::vector<int64_t> shape(stack.begin(), stack.end());
  shape.insert(shape.end(), {panels, num_groups(weights, depth)});
  if (weight.scalar_type() == at::kByte)
    shape.push_back(int4_group_bytes(weights));
  else
    shape.insert(shape.end(), {kPanel, weights == Weights::int8 ? 4 : 2});
  TORCH_CHECK(weight.sizes() == at::IntArrayRef(shape), op, ": weight must have shape ", at::IntArrayRef(shape),
              " to fit x and out_features, not ", weight.sizes());
  TORCH_CHECK(weight.is_contiguous(), op, ": weight must be contiguous");
  TORCH_CHECK((weights != Weights::int8 && weights != Weights::int4) || depth <= kLargestIntegerDepth, op,
              ": x must have at most ", kLargestIntegerDepth, " columns with ",
              weights == Weights::int8 ? "int8" : "int4", " weights, not ", depth);
}

}  // namespace kvforge
