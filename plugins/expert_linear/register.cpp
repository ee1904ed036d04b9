#include <torch/library.h>

#include <optional>

namespace kvforge {

at::Tensor expert_linear(
    const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& scales, const at::Tensor& expert_ids,
    int64_t out_features, bool gated, bool float32_out);

TORCH_LIBRARY_IMPL(kvforge, CPU, m) {
  m.impl("expert_linear", &expert_linear);
}

}  // namespace kvforge
