#include <torch/library.h>

namespace kvforge {

at::Tensor short_conv(
    const at::Tensor& x, const at::Tensor& weight, const at::Tensor& query_start, const at::Tensor& state_read,
    const at::Tensor& state_write, at::Tensor& conv_pool, bool activates,
    const std::optional<at::Tensor>& bias);

TORCH_LIBRARY_IMPL(kvforge, CPU, m) {
  m.impl("short_conv", &short_conv);
}

}  // namespace kvforge
