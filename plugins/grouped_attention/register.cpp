#include <torch/library.h>

namespace kvforge {

at::Tensor grouped_attention(
    const at::Tensor& q, const at::Tensor& k_codes, const at::Tensor& v_codes, const at::Tensor& k_groups,
    const at::Tensor& v_groups, const at::Tensor& exact_k, const at::Tensor& exact_v, const at::Tensor& query_start,
    const at::Tensor& kv_length, const at::Tensor& page_table, const at::Tensor& exact_table, double scale,
    int64_t window);

TORCH_LIBRARY_IMPL(kvforge, CPU, m) {
  m.impl("grouped_attention", &grouped_attention);
}

}  // namespace kvforge
