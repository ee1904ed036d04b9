#include <torch/library.h>

#include <tuple>

namespace kvforge {

std::tuple<at::Tensor, at::Tensor> speculative_verify(
    const at::Tensor& logits, const at::Tensor& draft_ids, const at::Tensor& draft_start,
    const at::Tensor& draft_probs, const at::Tensor& temperature, const at::Tensor& uniform);

TORCH_LIBRARY_IMPL(kvforge, CPU, m) {
  m.impl("speculative_verify", &speculative_verify);
}

}  // namespace kvforge
