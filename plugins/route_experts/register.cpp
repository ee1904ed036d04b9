#include <torch/library.h>

#include <tuple>

namespace kvforge {

std::tuple<at::Tensor, at::Tensor> route_experts(const at::Tensor& logits, int64_t num_active, bool normalize);

TORCH_LIBRARY_IMPL(kvforge, CPU, m) {
  m.impl("route_experts", &route_experts);
}

}  // namespace kvforge
