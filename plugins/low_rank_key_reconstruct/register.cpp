#include <torch/library.h>

namespace kvforge {

at::Tensor low_rank_key_reconstruct(
    const at::Tensor& u, const at::Tensor& sv, const at::Tensor& slot, const at::Tensor& chunks,
    const at::Tensor& shadow_table, const at::Tensor& cos, const at::Tensor& sin, int64_t chunk_size);

TORCH_LIBRARY_IMPL(kvforge, CPU, m) {
  m.impl("low_rank_key_reconstruct", &low_rank_key_reconstruct);
}

}  // namespace kvforge
