// kvforge::paged_attention on CPU.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "native/checks.h"

namespace kvforge {
namespace {

constexpr const char* kOp = "paged_attention";

float load(const at::Tensor& t, int64_t index) {
  return t.scalar_type() == at::kFloat ? t.const_data_ptr<float>()[index]
                                       : static_cast<float>(t.const_data_ptr<at::BFloat16>()[index]);
}

at::Tensor paged_attention(
    const at::Tensor& q_in, const at::Tensor& k_pool, const at::Tensor& v_pool, const at::Tensor& query_start_in,
    const at::Tensor& kv_length_in, const at::Tensor& page_table_in, double scale, int64_t window) {
  check_pools(kOp, k_pool, v_pool);
  check_float(kOp, "q", q_in, 3);
  const at::Tensor q = q_in.contiguous();
  const int64_t heads = q.size(1), head_dim = q.size(2), kv_heads = k_pool.size(2), page_size = k_pool.size(1);
  const at::Tensor query_start = int32_tensor(kOp, "query_start", query_start_in, {-1});
  const int64_t sequences = query_start.size(0) - 1;
  const at::Tensor kv_length = int32_tensor(kOp, "kv_length", kv_length_in, {sequences});
  const at::Tensor page_table = int32_tensor(kOp, "page_table", page_table_in, {sequences, -1});
  const int32_t* start = query_start.const_data_ptr<int32_t>();
  at::Tensor out = at::empty(q.sizes(), q.options());
  const int64_t group = heads / kv_heads;
  for (int64_t s = 0; s < sequences; ++s) {
    const int32_t* pages = page_table.const_data_ptr<int32_t>() + s * page_table.size(1);
    const int64_t n = start[s + 1] - start[s];
    at::parallel_for(0, n * heads, 1, [&](int64_t begin, int64_t end) {
      std::vector<float> score, acc(head_dim);
      for (int64_t row = begin; row < end; ++row) {
        const int64_t token = start[s] + row / heads, head = row % heads, kv = head / group;
        const int64_t position = kv_length.const_data_ptr<int32_t>()[s] - n + row / heads;
        const int64_t first = window > 0 ? std::max<int64_t>(0, position - window + 1) : 0;
        score.assign(position + 1 - first, 0.f);
        float top = -INFINITY, sum = 0;
        for (int64_t j = first; j <= position; ++j) {
          const int64_t at = pages[j / page_size] * k_pool.stride(0) + j % page_size * k_pool.stride(1) + kv * k_pool.stride(2);
          float dot = 0;
          for (int64_t d = 0; d < head_dim; ++d) dot += load(q, (token * heads + head) * head_dim + d) * load(k_pool, at + d);
          score[j - first] = dot * static_cast<float>(scale);
          top = std::max(top, score[j - first]);
        }
        std::fill(acc.begin(), acc.end(), 0.f);
        for (int64_t j = first; j <= position; ++j) {
          const int64_t at = pages[j / page_size] * v_pool.stride(0) + j % page_size * v_pool.stride(1) + kv * v_pool.stride(2);
          const float p = std::exp(score[j - first] - top);
          sum += p;
          for (int64_t d = 0; d < head_dim; ++d) acc[d] += p * load(v_pool, at + d);
        }
        for (int64_t d = 0; d < head_dim; ++d) {
          const int64_t at = (token * heads + head) * head_dim + d;
          if (q.scalar_type() == at::kFloat) out.mutable_data_ptr<float>()[at] = acc[d] / sum;
          else out.mutable_data_ptr<at::BFloat16>()[at] = acc[d] / sum;
        }
      }
    });
  }
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(kvforge, CPU, m) { m.impl("paged_attention", &paged_attention); }

}  // namespace kvforge
