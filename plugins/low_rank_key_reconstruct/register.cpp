#include <torch/library.h>

namespace kvforge {

at::Tensor low_rank_key_reconstruct(
    const at::Tensor& u, const at::Tensor& sv, const at::Tensor& selected_start, const at::Tensor& rows,
    const at::Tensor& positions, const at::Tensor& cos, const at::Tensor& sin);

TORCH_LIBRARY_IMPL(kvforge, CPU, m) {
  m.impl("low_rank_key_reconstruct", &low_rank_key_reconstruct);
}

}  // namespace kvforge
