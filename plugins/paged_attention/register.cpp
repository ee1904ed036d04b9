#include <torch/library.h>

#include <optional>

namespace kvforge {

at::Tensor paged_attention(
    const at::Tensor& q, const at::Tensor& k_pool, const at::Tensor& v_pool, const at::Tensor& query_start,
    const at::Tensor& kv_length, const at::Tensor& page_table, double scale, int64_t window,
    const std::optional<at::Tensor>& k_scales, const std::optional<at::Tensor>& v_scales, double k_scale,
    double v_scale, const std::optional<at::Tensor>& sinks, bool rotates_keys);

TORCH_LIBRARY_IMPL(kvforge, CPU, m) {
  m.impl("paged_attention", &paged_attention);
}

}  // namespace kvforge
