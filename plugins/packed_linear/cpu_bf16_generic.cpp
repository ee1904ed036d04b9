// bfloat16 weights without AVX512-BF16. Compiled once per instruction set into namespace KVFORGE_ISA, so no inline
// function with external linkage may be used here.
#include "packed_linear/cpu_bf16_rows.h"

namespace kvforge {
namespace {

constexpr int kVectors = kPanel / kLanes;

// One row; a pair's two products are added in the order of the depth.
void multiply_row(const char* row, const LinearTile& t, float* sums) {
  vfloat acc[kVectors] = {};
  if (t.add)
    for (int j = 0; j < kVectors; ++j) acc[j] = load(sums + j * kLanes);
  const char* weight = t.weight;
  for (int64_t g = 0; g < t.groups; ++g, weight += kPanelGroupBytes) {
    uint32_t pair;
    std::memcpy(&pair, row + g * kGroupBytes, sizeof pair);
    const float even = from_bits(pair << 16), odd = from_bits(pair & 0xffff0000u);
#pragma GCC unroll 16
    for (int j = 0; j < kVectors; ++j) {
      vint right;
      std::memcpy(&right, weight + j * sizeof right, sizeof right);
      acc[j] += even * reinterpret_cast<vfloat>(right << 16);
      acc[j] += odd * reinterpret_cast<vfloat>(right & static_cast<int32_t>(0xffff0000));
    }
  }
  for (int j = 0; j < kVectors; ++j) store(sums + j * kLanes, acc[j]);
}

void multiply(const LinearTile& t) {
  for (int64_t r = 0; r < t.num_rows; ++r)
    multiply_row(t.rows + r * t.band_stride, t, static_cast<float*>(t.sums) + r * kPanel);
}

}  // namespace

namespace KVFORGE_ISA {
const LinearKernel linear_bf16_kernel = {
    .takes_x = takes_x,
    .band_bytes = row_bytes,
    .prepare = prepare_rows,
    .multiply = multiply,
    .finish = finish_linear,
};
}

}  // namespace kvforge
