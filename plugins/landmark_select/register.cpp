#include <torch/library.h>

namespace kvforge {

at::Tensor landmark_select(
    const at::Tensor& q, const at::Tensor& landmarks, const at::Tensor& is_outlier, const at::Tensor& query_start,
    const at::Tensor& table, const at::Tensor& num_chunks, const at::Tensor& num_selected, double scale,
    int64_t max_selected);

TORCH_LIBRARY_IMPL(kvforge, CPU, m) {
  m.impl("landmark_select", &landmark_select);
}

}  // namespace kvforge
