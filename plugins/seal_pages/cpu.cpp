// kvforge::seal_pages on CPU: checks, then one page and KV head after the other.
#include <ATen/core/Tensor.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "native/cast.h"
#include "native/checks.h"
#include "native/dynamic_for.h"
#include "native/sealed_pages.h"

namespace kvforge {
namespace {

constexpr const char* kOp = "seal_pages";
constexpr float kLeastStep = 0x1p-14f;  // the smallest normal float16

// Codes of 32 numbers that are `stride` apart, and their least number and step.
template <typename T>
void quantize(const T* x, int64_t stride, uint8_t* codes, c10::Half* group) {
  float numbers[kGroup];
  for (int64_t i = 0; i < kGroup; ++i) numbers[i] = to_float(x[i * stride]);
  float low = numbers[0], high = numbers[0];
  for (int64_t i = 1; i < kGroup; ++i) {
    low = std::min(low, numbers[i]);
    high = std::max(high, numbers[i]);
  }
  const c10::Half least(low);
  const c10::Half step(std::max(static_cast<float>(c10::Half((high - low) / 3.0f)), kLeastStep));
  group[0] = least;
  group[1] = step;
  for (int64_t i = 0; i < kGroup; ++i) {
    const float code = std::nearbyint((numbers[i] - static_cast<float>(least)) / static_cast<float>(step));
    codes[i] = static_cast<uint8_t>(code > 0.0f ? std::min(code, 3.0f) : 0.0f);  // of a NaN 0
  }
}

uint8_t packed(const uint8_t* codes) { return codes[0] | codes[1] << 2 | codes[2] << 4 | codes[3] << 6; }

// One KV head of a page: k and v are its first token's, rows of a page lie `row` apart.
template <typename T>
void seal(const SealedPages& p, const T* k, const T* v, int64_t head, uint8_t* k_codes, uint8_t* v_codes,
          c10::Half* k_groups, c10::Half* v_groups) {
  const int64_t row = p.kv_heads * p.head_dim, code_row = p.kv_heads * p.code_row();
  k += head * p.head_dim;
  v += head * p.head_dim;
  std::vector<uint8_t> codes(p.head_dim * kGroup), column(kGroup);
  for (int64_t g = 0; g < p.page_size / kGroup; ++g) {
    for (int64_t d = 0; d < p.head_dim; ++d) {
      quantize(k + g * kGroup * row + d, row, column.data(), k_groups + ((g * p.kv_heads + head) * p.head_dim + d) * 2);
      for (int64_t i = 0; i < kGroup; ++i) codes[i * p.head_dim + d] = column[i];
    }
    for (int64_t i = 0; i < kGroup; ++i)
      for (int64_t b = 0; b < p.code_row(); ++b)
        k_codes[(g * kGroup + i) * code_row + head * p.code_row() + b] = packed(&codes[i * p.head_dim + 4 * b]);
  }
  for (int64_t t = 0; t < p.page_size; ++t) {
    for (int64_t g = 0; g < p.head_dim / kGroup; ++g)
      quantize(v + t * row + g * kGroup, 1, &codes[g * kGroup],
               v_groups + ((t * p.kv_heads + head) * (p.head_dim / kGroup) + g) * 2);
    for (int64_t b = 0; b < p.code_row(); ++b)
      v_codes[t * code_row + head * p.code_row() + b] = packed(&codes[4 * b]);
  }
}

template <typename T>
void seal_all(const SealedPages& p, const std::vector<std::pair<int64_t, int64_t>>& pairs, const at::Tensor& exact_k,
              const at::Tensor& exact_v, at::Tensor& k_codes, at::Tensor& v_codes, at::Tensor& k_groups,
              at::Tensor& v_groups) {
  const T *k = static_cast<const T*>(exact_k.const_data_ptr()), *v = static_cast<const T*>(exact_v.const_data_ptr());
  const int64_t exact_page = p.page_size * p.kv_heads * p.head_dim;
  uint8_t *kc = k_codes.mutable_data_ptr<uint8_t>(), *vc = v_codes.mutable_data_ptr<uint8_t>();
  auto *kg = k_groups.mutable_data_ptr<c10::Half>(), *vg = v_groups.mutable_data_ptr<c10::Half>();
  const int64_t count = static_cast<int64_t>(pairs.size()) * p.kv_heads;
  dynamic_for(count, count, [&](int64_t i) {
    const auto [exact, page] = pairs[i / p.kv_heads];
    seal(p, k + exact * exact_page, v + exact * exact_page, i % p.kv_heads, kc + page * p.code_page(),
         vc + page * p.code_page(), kg + page * p.k_group_page(), vg + page * p.v_group_page());
  });
}

}  // namespace

void seal_pages(const at::Tensor& exact_k, const at::Tensor& exact_v, const at::Tensor& seal_in, at::Tensor& k_codes,
                at::Tensor& v_codes, at::Tensor& k_groups, at::Tensor& v_groups) {
  const SealedPages p = check_sealed_pages(kOp, exact_k, exact_v, k_codes, v_codes, k_groups, v_groups);
  const at::Tensor seal_rows = int32_tensor(kOp, "seal", seal_in, {-1, 2});
  const int32_t* row = seal_rows.const_data_ptr<int32_t>();
  std::vector<std::pair<int64_t, int64_t>> pairs;
  for (int64_t i = 0; i < seal_rows.size(0); ++i) {
    const int64_t exact = row[2 * i], page = row[2 * i + 1];
    if (exact < 0) continue;
    TORCH_CHECK(exact < p.exact_pages, kOp, ": seal names exact page ", exact, " of ", p.exact_pages);
    TORCH_CHECK(page >= 0 && page < p.pages, kOp, ": seal names page ", page, " of ", p.pages);
    pairs.emplace_back(exact, page);
  }
  if (exact_k.scalar_type() == at::kFloat)
    seal_all<float>(p, pairs, exact_k, exact_v, k_codes, v_codes, k_groups, v_groups);
  else
    seal_all<bf16>(p, pairs, exact_k, exact_v, k_codes, v_codes, k_groups, v_groups);
}

}  // namespace kvforge
