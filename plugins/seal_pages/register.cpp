#include <torch/library.h>

namespace kvforge {

void seal_pages(const at::Tensor& exact_k, const at::Tensor& exact_v, const at::Tensor& seal, at::Tensor& k_codes,
                at::Tensor& v_codes, at::Tensor& k_groups, at::Tensor& v_groups);

TORCH_LIBRARY_IMPL(kvforge, CPU, m) {
  m.impl("seal_pages", &seal_pages);
}

}  // namespace kvforge
