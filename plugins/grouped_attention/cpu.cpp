// kvforge::grouped_attention on CPU: for each sequence and KV head one page after the other, read once for all queries
// that see it. A query adds up its pages in their order, and in a page its keys in theirs, whatever is beside it.
#include <ATen/core/Tensor.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "native/cast.h"
#include "native/checks.h"
#include "native/dynamic_for.h"
#include "native/sealed_pages.h"

namespace kvforge {
namespace {

constexpr const char* kOp = "grouped_attention";

// One KV head's part of a page in float32: keys [head_dim, page_size], values [page_size, head_dim].
struct Page {
  std::vector<float> k, v;

  explicit Page(const SealedPages& p) : k(p.head_dim * p.page_size), v(p.page_size * p.head_dim) {}

  template <typename T>
  void read_exact(const SealedPages& p, const T* exact_k, const T* exact_v, int64_t page, int64_t head, int64_t count) {
    for (int64_t t = 0; t < count; ++t) {
      const int64_t row = ((page * p.page_size + t) * p.kv_heads + head) * p.head_dim;
      for (int64_t d = 0; d < p.head_dim; ++d) k[d * p.page_size + t] = to_float(exact_k[row + d]);
      for (int64_t d = 0; d < p.head_dim; ++d) v[t * p.head_dim + d] = to_float(exact_v[row + d]);
    }
    for (int64_t d = 0; d < p.head_dim; ++d) std::fill_n(&k[d * p.page_size + count], p.page_size - count, 0.0f);
  }

  void read_sealed(const SealedPages& p, const uint8_t* k_codes, const uint8_t* v_codes, const c10::Half* k_groups,
                   const c10::Half* v_groups, int64_t head) {
    for (int64_t t = 0; t < p.page_size; ++t) {
      const int64_t row = (t * p.kv_heads + head) * p.code_row();
      const c10::Half* of_v = v_groups + (t * p.kv_heads + head) * (p.head_dim / kGroup) * 2;
      const c10::Half* of_k = k_groups + (t / kGroup * p.kv_heads + head) * p.head_dim * 2;
      for (int64_t d = 0; d < p.head_dim; ++d) {
        const int shift = 2 * (d % 4);
        const float k_code = k_codes[row + d / 4] >> shift & 3, v_code = v_codes[row + d / 4] >> shift & 3;
        k[d * p.page_size + t] = k_code * static_cast<float>(of_k[2 * d + 1]) + static_cast<float>(of_k[2 * d]);
        const c10::Half* group = of_v + 2 * (d / kGroup);
        v[t * p.head_dim + d] = v_code * static_cast<float>(group[1]) + static_cast<float>(group[0]);
      }
    }
  }
};

// Softmax of a query's keys so far, relative to the largest score.
struct Query {
  float* sums;  // [head_dim]
  float largest, total;

  // Adds keys [begin, end) of a page; all scores are computed, so that a key's does not depend on the others.
  void add(const SealedPages& p, const Page& page, const float* q, float scale, int64_t begin, int64_t end,
           float* scores) {
    std::fill_n(scores, p.page_size, 0.0f);
    for (int64_t d = 0; d < p.head_dim; ++d)
      for (int64_t t = 0; t < p.page_size; ++t) scores[t] += q[d] * page.k[d * p.page_size + t];
    float most = largest;
    for (int64_t t = begin; t < end; ++t) most = std::max(most, scores[t] *= scale);
    const float rescale = std::exp(largest - most);
    total *= rescale;
    for (int64_t d = 0; d < p.head_dim; ++d) sums[d] *= rescale;
    for (int64_t t = begin; t < end; ++t) {
      const float weight = std::exp(scores[t] - most);
      total += weight;
      for (int64_t d = 0; d < p.head_dim; ++d) sums[d] += weight * page.v[t * p.head_dim + d];
    }
    largest = most;
  }
};

struct Pools {
  const uint8_t *k_codes, *v_codes;
  const c10::Half *k_groups, *v_groups;
};

// All queries of one sequence for one KV head; q and out are the sequence's first row of heads.
template <typename T>
void attend(const SealedPages& p, const Pools& pools, const T* exact_k, const T* exact_v, const T* q, T* out,
            int64_t num_queries, int64_t heads, int64_t length, const int32_t* pages, const int32_t* exact,
            int64_t head, float scale, int64_t window) {
  const int64_t group = heads / p.kv_heads, first = length - num_queries, count = num_queries * group;
  std::vector<float> queries(count * p.head_dim), sums(count * p.head_dim, 0.0f), scores(p.page_size);
  std::vector<Query> states(count);
  for (int64_t i = 0; i < count; ++i) {
    const T* row = q + (i / group * heads + head * group + i % group) * p.head_dim;
    for (int64_t d = 0; d < p.head_dim; ++d) queries[i * p.head_dim + d] = to_float(row[d]);
    states[i] = {&sums[i * p.head_dim], -std::numeric_limits<float>::infinity(), 0.0f};
  }
  const auto first_key = [&](int64_t position) { return window > 0 ? std::max<int64_t>(0, position - window + 1) : 0; };
  Page page(p);
  for (int64_t j = first_key(first) / p.page_size; j * p.page_size < length; ++j) {
    const int64_t begin = j * p.page_size, end = begin + p.page_size;
    const auto add = [&](int64_t from, int64_t to) {  // for the queries at these positions
      for (int64_t position = from; position < to; ++position) {
        const int64_t low = std::max<int64_t>(first_key(position) - begin, 0);
        const int64_t high = std::min(position + 1 - begin, p.page_size);
        for (int64_t g = 0; low < high && g < group; ++g) {
          const int64_t i = (position - first) * group + g;
          states[i].add(p, page, &queries[i * p.head_dim], scale, low, high, scores.data());
        }
      }
    };
    if (end > first) {
      page.read_exact(p, exact_k, exact_v, exact[j], head, std::min(length, end) - begin);
      add(std::max(first, begin), std::min(length, end));
    }
    if (end < length) {
      const int64_t at = pages[j];
      page.read_sealed(p, pools.k_codes + at * p.code_page(), pools.v_codes + at * p.code_page(),
                       pools.k_groups + at * p.k_group_page(), pools.v_groups + at * p.v_group_page(), head);
      add(std::max(first, end), length);
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    T* row = out + (i / group * heads + head * group + i % group) * p.head_dim;
    for (int64_t d = 0; d < p.head_dim; ++d) store(row + d, states[i].sums[d] / states[i].total);
  }
}

}  // namespace

at::Tensor grouped_attention(
    const at::Tensor& q_in, const at::Tensor& k_codes, const at::Tensor& v_codes, const at::Tensor& k_groups,
    const at::Tensor& v_groups, const at::Tensor& exact_k, const at::Tensor& exact_v, const at::Tensor& query_start_in,
    const at::Tensor& kv_length_in, const at::Tensor& page_table_in, const at::Tensor& exact_table_in, double scale,
    int64_t window) {
  const SealedPages p = check_sealed_pages(kOp, exact_k, exact_v, k_codes, v_codes, k_groups, v_groups);
  check_float(kOp, "q", q_in, 3);
  const at::Tensor q = q_in.contiguous();
  const int64_t heads = q.size(1);
  TORCH_CHECK(q.scalar_type() == exact_k.scalar_type(), kOp, ": q must have the dtype of exact_k, ",
              exact_k.scalar_type(), ", not ", q.scalar_type());
  TORCH_CHECK(q.size(2) == p.head_dim && p.kv_heads > 0 && heads % p.kv_heads == 0, kOp,
              ": q must have heads that exact_k's divide, of ", p.head_dim, ", not shape ", q.sizes());
  TORCH_CHECK(window >= 0, kOp, ": window must not be negative, but is ", window);
  const at::Tensor query_start = starts_tensor(kOp, "query_start", query_start_in, q.size(0));
  const int64_t sequences = query_start.size(0) - 1;
  const at::Tensor kv_length = int32_tensor(kOp, "kv_length", kv_length_in, {sequences});
  const at::Tensor page_table = int32_tensor(kOp, "page_table", page_table_in, {sequences, -1});
  const at::Tensor exact_table = int32_tensor(kOp, "exact_table", exact_table_in, page_table.sizes());
  const int32_t *start = query_start.const_data_ptr<int32_t>(), *lengths = kv_length.const_data_ptr<int32_t>();
  const int32_t *pages = page_table.const_data_ptr<int32_t>(), *exact = exact_table.const_data_ptr<int32_t>();
  const int64_t columns = page_table.size(1);
  for (int64_t s = 0; s < sequences; ++s) {
    const int64_t length = lengths[s], first = length - (start[s + 1] - start[s]);
    if (first == length) continue;
    TORCH_CHECK(first >= 0 && length <= columns * p.page_size, kOp, ": kv_length holds ", length, " for ",
                length - first, " queries and ", columns, " pages");
    const int64_t least = window > 0 ? std::max<int64_t>(0, first - window + 1) : 0;
    for (int64_t j = least / p.page_size; j * p.page_size < length; ++j) {
      const int64_t end = (j + 1) * p.page_size, page = pages[s * columns + j], at = exact[s * columns + j];
      TORCH_CHECK(end >= length || (page >= 0 && page < p.pages), kOp, ": page_table names page ", page, " of ",
                  p.pages);
      TORCH_CHECK(end <= first || (at >= 0 && at < p.exact_pages), kOp, ": exact_table names page ", at, " of ",
                  p.exact_pages);
    }
  }
  at::Tensor out = q.new_empty(q.sizes());
  const Pools pools{k_codes.const_data_ptr<uint8_t>(), v_codes.const_data_ptr<uint8_t>(),
                    k_groups.const_data_ptr<c10::Half>(), v_groups.const_data_ptr<c10::Half>()};
  const auto run = [&](auto zero) {
    using T = decltype(zero);
    const T *k = static_cast<const T*>(exact_k.const_data_ptr()), *v = static_cast<const T*>(exact_v.const_data_ptr());
    const T* from = static_cast<const T*>(q.const_data_ptr());
    T* to = static_cast<T*>(out.mutable_data_ptr());
    dynamic_for(sequences * p.kv_heads, sequences * p.kv_heads, [&](int64_t i) {
      const int64_t s = i / p.kv_heads, row = start[s] * heads * p.head_dim;
      if (start[s] == start[s + 1]) return;
      attend(p, pools, k, v, from + row, to + row, start[s + 1] - start[s], heads, lengths[s], pages + s * columns,
             exact + s * columns, i % p.kv_heads, static_cast<float>(scale), window);
    });
  };
  if (q.scalar_type() == at::kFloat)
    run(float{});
  else
    run(bf16{});
  return out;
}

}  // namespace kvforge
