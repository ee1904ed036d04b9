#include <torch/library.h>

#include <optional>

namespace kvforge {

void attention_mass(
    const at::Tensor& q, const at::Tensor& k_pool, const at::Tensor& query_start, const at::Tensor& kv_length,
    const at::Tensor& page_table, const at::Tensor& state_table, const at::Tensor& skipped, const at::Tensor& scored,
    double scale, int64_t kind, at::Tensor& mass, const std::optional<at::Tensor>& squares,
    const std::optional<at::Tensor>& k_scales, double k_scale);

TORCH_LIBRARY_IMPL(kvforge, CPU, m) {
  m.impl("attention_mass", &attention_mass);
}

}  // namespace kvforge
