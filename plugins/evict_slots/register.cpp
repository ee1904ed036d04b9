#include <torch/library.h>

#include <optional>

namespace kvforge {

void evict_slots(
    const at::Tensor& score, const at::Tensor& keep, const at::Tensor& kv_length, const at::Tensor& sealed,
    const at::Tensor& shift, const at::Tensor& page_table, const at::Tensor& state_table, at::Tensor& position,
    at::Tensor& k_pool, at::Tensor& v_pool, const std::optional<at::Tensor>& k_scales,
    const std::optional<at::Tensor>& v_scales, const std::optional<at::Tensor>& mass,
    const std::optional<at::Tensor>& squares);

TORCH_LIBRARY_IMPL(kvforge, CPU, m) {
  m.impl("evict_slots", &evict_slots);
}

}  // namespace kvforge
