#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>

#include "native/checks.h"

namespace kvforge {

at::Tensor scaled_add(const at::Tensor& x, const at::Tensor& y, double scale) {
  const at::Tensor left = float32_tensor("scaled_add", "x", x, x.sizes());
  const at::Tensor right = float32_tensor("scaled_add", "y", y, x.sizes());
  at::Tensor out = at::empty_like(left);
  const float* a = left.const_data_ptr<float>();
  const float* b = right.const_data_ptr<float>();
  float* result = out.mutable_data_ptr<float>();
  for (int64_t i = 0; i < left.numel(); ++i) result[i] = a[i] + static_cast<float>(scale) * b[i];
  return out;
}

}  // namespace kvforge
