#include <torch/library.h>

#include <optional>

namespace kvforge {

at::Tensor packed_linear(
    const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& scales,
    const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& norm,
    const std::optional<at::Tensor>& residual, int64_t out_features, double eps, bool gated, bool float32_out,
    bool rotated);

TORCH_LIBRARY_IMPL(kvforge, CPU, m) {
  m.impl("packed_linear", &packed_linear);
}

}  // namespace kvforge
