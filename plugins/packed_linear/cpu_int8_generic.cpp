// int8 weights without VNNI. Compiled once per instruction set into namespace KVFORGE_ISA, so no inline function with
// external linkage may be used here. A prepared row is the quantized values plus 128, padded to whole groups, then at
// the next multiple of 64 bytes the row's scale.
#include "packed_linear/cpu_kernel.h"
#include "packed_linear/cpu_norm.h"

namespace kvforge {
namespace {

int64_t scale_offset(const LinearArgs& a) { return (a.depth + 63) / 64 * 64; }

bool takes_x(const LinearArgs&) { return false; }

int64_t row_bytes(const LinearArgs& a) { return scale_offset(a) + 64; }

// Scale max|x| / 127, at least the smallest normal number; not finite if the row is not.
void quantize_row(const bf16* x, int64_t depth, uint8_t* out, float* scale) {
  uint32_t largest = 0;  // bits of |x| are ordered as |x| is, NaN last
  for (int64_t i = 0; i < depth; ++i) {
    const uint32_t magnitude = x[i] & 0x7fffu;
    largest = magnitude > largest ? magnitude : largest;
  }
  const float divided = from_bits(largest << 16) / 127.0f;
  *scale = divided < 0x1p-126f ? 0x1p-126f : divided;
  for (int64_t i = 0; i < depth; ++i)
    out[i] = static_cast<uint8_t>(to_int8(to_float(x[i]) / *scale)) ^ 0x80;
}

void prepare(const LinearArgs& a, int64_t begin, int64_t end, char* rows, char* scratch) {
  bf16* normed = reinterpret_cast<bf16*>(scratch);
  for (int64_t r = begin; r < end; ++r, rows += row_bytes(a)) {
    const bf16* x = a.x + r * a.x_stride;
    if (a.norm != nullptr) rms_norm(x, a.norm, a.depth, a.eps, normed);
    float scale;
    quantize_row(a.norm != nullptr ? normed : x, a.depth, reinterpret_cast<uint8_t*>(rows), &scale);
    std::memset(rows + a.depth, 0, scale_offset(a) - a.depth);
    std::memcpy(rows + scale_offset(a), &scale, sizeof scale);
  }
}

void multiply(const LinearTile& t) {
  for (int64_t r = 0; r < t.num_rows; ++r) {
    int32_t* sums = static_cast<int32_t*>(t.sums) + r * kPanel;
    if (!t.add) std::memset(sums, 0, kPanel * sizeof(int32_t));
    const uint8_t* row = reinterpret_cast<const uint8_t*>(t.rows + r * t.row_stride);
    const int8_t* weight = reinterpret_cast<const int8_t*>(t.weight);
    for (int64_t g = 0; g < t.groups; ++g, row += kGroupBytes, weight += kPanelGroupBytes)
      for (int64_t j = 0; j < kPanel; ++j)
        sums[j] += row[0] * weight[4 * j] + row[1] * weight[4 * j + 1] + row[2] * weight[4 * j + 2] +
            row[3] * weight[4 * j + 3];
  }
}

void dequantize(const LinearArgs& a, const char* rows, int64_t row_stride, int64_t num_rows, int64_t panel,
                void* sums) {
  const float* scales = a.weight_scales + panel * kPanel;
  const float* totals = a.weight_sums + panel * kPanel;
  for (int64_t r = 0; r < num_rows; ++r) {
    float row_scale;
    std::memcpy(&row_scale, rows + r * row_stride + scale_offset(a), sizeof row_scale);
    char* row = static_cast<char*>(sums) + r * kPanel * sizeof(float);
    for (int64_t j = 0; j < kPanel; ++j) {
      int32_t sum;
      std::memcpy(&sum, row + j * sizeof sum, sizeof sum);
      const float value = static_cast<float>(sum - 128 * static_cast<int32_t>(totals[j])) * row_scale * scales[j];
      std::memcpy(row + j * sizeof value, &value, sizeof value);
    }
  }
}

}  // namespace

namespace KVFORGE_ISA {
const LinearKernel linear_int8_kernel = {takes_x, row_bytes, prepare, multiply, dequantize, finish_linear};
}

}  // namespace kvforge
