// Pages of K and V in 2 bits, as seal_pages writes them: checks, and where things are.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include "native/checks.h"

namespace kvforge {

constexpr int64_t kGroup = 32;  // numbers that share a least number and a step

struct SealedPages {
  int64_t exact_pages, pages, page_size, kv_heads, head_dim;

  int64_t code_row() const { return head_dim / 4; }
  int64_t code_page() const { return page_size * kv_heads * code_row(); }
  int64_t k_group_page() const { return page_size / kGroup * kv_heads * head_dim * 2; }
  int64_t v_group_page() const { return page_size * kv_heads * (head_dim / kGroup) * 2; }
};

inline void check_sealed(const char* op, const char* name, const at::Tensor& t, at::ScalarType type,
                         at::IntArrayRef shape) {
  TORCH_CHECK(t.scalar_type() == type, op, ": ", name, " must be ", type, ", not ", t.scalar_type());
  TORCH_CHECK(t.sizes() == shape, op, ": ", name, " must have shape ", shape, ", not ", t.sizes());
  TORCH_CHECK(t.is_contiguous(), op, ": ", name, " must be contiguous");
}

inline SealedPages check_sealed_pages(const char* op, const at::Tensor& exact_k, const at::Tensor& exact_v,
                                      const at::Tensor& k_codes, const at::Tensor& v_codes, const at::Tensor& k_groups,
                                      const at::Tensor& v_groups) {
  check_float(op, "exact_k", exact_k, 4);
  check_sealed(op, "exact_v", exact_v, exact_k.scalar_type(), exact_k.sizes());
  TORCH_CHECK(exact_k.is_contiguous(), op, ": exact_k must be contiguous");
  check_dims(op, "k_codes", k_codes, 4);
  const SealedPages p{exact_k.size(0), k_codes.size(0), exact_k.size(1), exact_k.size(2), exact_k.size(3)};
  TORCH_CHECK(p.page_size > 0 && p.page_size % kGroup == 0 && p.head_dim > 0 && p.head_dim % kGroup == 0, op,
              ": exact_k must have pages and heads of a multiple of ", kGroup, ", not ", exact_k.sizes());
  check_sealed(op, "k_codes", k_codes, at::kByte, {p.pages, p.page_size, p.kv_heads, p.code_row()});
  check_sealed(op, "v_codes", v_codes, at::kByte, k_codes.sizes());
  check_sealed(op, "k_groups", k_groups, at::kHalf, {p.pages, p.page_size / kGroup, p.kv_heads, p.head_dim, 2});
  check_sealed(op, "v_groups", v_groups, at::kHalf, {p.pages, p.page_size, p.kv_heads, p.head_dim / kGroup, 2});
  return p;
}

}  // namespace kvforge
