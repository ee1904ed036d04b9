#include <torch/library.h>

#include <tuple>

namespace kvforge {

std::tuple<at::Tensor, at::Tensor> chunk_cache_update(
    const at::Tensor& selected, at::Tensor& cached, at::Tensor& counts, const at::Tensor& slot);

TORCH_LIBRARY_IMPL(kvforge, CPU, m) {
  m.impl("chunk_cache_update", &chunk_cache_update);
}

}  // namespace kvforge
