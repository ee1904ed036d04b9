#include <torch/library.h>

namespace kvforge {

at::Tensor gated_delta_rule(
    const at::Tensor& qkv, const at::Tensor& gates, const at::Tensor& decay_log, const at::Tensor& decay_bias,
    const at::Tensor& query_start, const at::Tensor& state_read, const at::Tensor& state_write,
    at::Tensor& state_pool, bool has_queries);

TORCH_LIBRARY_IMPL(kvforge, CPU, m) {
  m.impl("gated_delta_rule", &gated_delta_rule);
}

}  // namespace kvforge
