#include <torch/library.h>

namespace kvforge {

void selected_kv_write(
    const at::Tensor& u, const at::Tensor& sv, const at::Tensor& host_v, const at::Tensor& slot,
    const at::Tensor& chunks, const at::Tensor& places, const at::Tensor& shadow_table, const at::Tensor& page_table,
    const at::Tensor& cos, const at::Tensor& sin, int64_t chunk_size, at::Tensor& k_pool, at::Tensor& v_pool);

TORCH_LIBRARY_IMPL(kvforge, CPU, m) {
  m.impl("selected_kv_write", &selected_kv_write);
}

}  // namespace kvforge
