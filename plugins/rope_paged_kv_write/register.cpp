#include <torch/library.h>

#include <optional>

namespace kvforge {

void rope_paged_kv_write(
    const at::Tensor& k, const at::Tensor& v, const at::Tensor& cos, const at::Tensor& sin,
    const at::Tensor& slot_mapping, at::Tensor& k_pool, at::Tensor& v_pool,
    const std::optional<at::Tensor>& k_scales, const std::optional<at::Tensor>& v_scales, double k_scale,
    double v_scale, bool rotates_keys);

TORCH_LIBRARY_IMPL(kvforge, CPU, m) {
  m.impl("rope_paged_kv_write", &rope_paged_kv_write);
}

}  // namespace kvforge
