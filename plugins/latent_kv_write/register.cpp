#include <torch/library.h>

#include <optional>

namespace kvforge {

void latent_kv_write(
    const at::Tensor& k, const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& slot_mapping,
    at::Tensor& k_pool, const std::optional<at::Tensor>& k_scales);

TORCH_LIBRARY_IMPL(kvforge, CPU, m) {
  m.impl("latent_kv_write", &latent_kv_write);
}

}  // namespace kvforge
