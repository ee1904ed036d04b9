#include <torch/library.h>

namespace kvforge {

at::Tensor mamba2_scan(
    const at::Tensor& xbc, const at::Tensor& steps, const at::Tensor& decay_log, const at::Tensor& step_bias,
    const at::Tensor& skip, const at::Tensor& query_start, const at::Tensor& state_read,
    const at::Tensor& state_write, at::Tensor& state_pool, bool has_queries);

TORCH_LIBRARY_IMPL(kvforge, CPU, m) {
  m.impl("mamba2_scan", &mamba2_scan);
}

}  // namespace kvforge
