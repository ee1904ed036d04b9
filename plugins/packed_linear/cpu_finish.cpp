// What follows the matrix product: bias, gate, residual and one rounding. Compiled once for instruction sets without
// AVX-512 into namespace KVFORGE_ISA, so no inline function with external linkage may be used here.
#include "native/simd.h"
#include "packed_linear/cpu_kernel.h"

namespace kvforge {
namespace {

inline void add(float* values, const bf16* other, int64_t count) {
  for (int64_t i = 0; i < count; ++i) values[i] += to_float(other[i]);
}

template <typename Out>
void write(Out* out, const float* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) store(out + i, values[i]);
}

// silu(gate) * up for kPanel / 2 values.
void gate_up(const float* gate, const float* up, float* values) {
  for (int64_t i = 0; i < kPanel / 2; i += kLanes) {
    const vfloat g = load(gate + i);
    const vfloat e = exp_nonpositive(g < 0 ? g : -g);
    store(values + i, g * ((g < 0 ? e : broadcast(1.0f)) / (e + 1.0f)) * load(up + i));
  }
}

}  // namespace

namespace KVFORGE_ISA {

void finish_linear(const LinearArgs& a, int64_t begin, int64_t num_rows, int64_t panel, const float* sums) {
  const int64_t width = a.gated ? kPanel / 2 : kPanel, first = panel * width;
  const int64_t count = first + width < a.outputs ? width : a.outputs - first;
  for (int64_t r = begin; r < begin + num_rows; ++r, sums += kPanel) {
    float values[kPanel];
    std::memcpy(values, sums, sizeof values);
    if (a.bias != nullptr) add(values, a.bias + first, count);
    if (a.gated) {
      if (a.bias != nullptr) add(values + width, a.bias + a.outputs + first, count);
      gate_up(values, values + width, values);
    }
    if (a.residual != nullptr) add(values, a.residual + r * a.residual_stride + first, count);
    if (a.float32_out) write(static_cast<float*>(a.out) + first_of_out(a, r) + first, values, count);
    else write(static_cast<bf16*>(a.out) + first_of_out(a, r) + first, values, count);
  }
}

}  // namespace KVFORGE_ISA
}  // namespace kvforge
