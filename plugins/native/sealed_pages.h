// Pages of K and V in 2, 3 or 4 bits: checks, and where things are. plugins/seal_pages/layout.py says what tiles and groups hold.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include "native/checks.h"
#include "native/sealed_layout.h"

namespace kvforge {

inline void check_sealed(const char* op, const char* name, const at::Tensor& t, at::ScalarType type,
                         at::IntArrayRef shape) {
  TORCH_CHECK(t.scalar_type() == type, op, ": ", name, " must be ", type, ", not ", t.scalar_type());
  TORCH_CHECK(t.sizes() == shape, op, ": ", name, " must have shape ", shape, ", not ", t.sizes());
  TORCH_CHECK(t.is_contiguous(), op, ": ", name, " must be contiguous");
}

inline SealedLayout check_sealed_pages(const char* op, const at::Tensor& exact_k, const at::Tensor& exact_v,
                                       const at::Tensor& k_codes, const at::Tensor& v_codes, const at::Tensor& k_groups,
                                       const at::Tensor& v_groups) {
  check_float(op, "exact_k", exact_k, 4);
  check_sealed(op, "exact_k", exact_k, exact_k.scalar_type(), exact_k.sizes());
  check_sealed(op, "exact_v", exact_v, exact_k.scalar_type(), exact_k.sizes());
  const int64_t page_size = exact_k.size(1), heads = exact_k.size(2), dim = exact_k.size(3);
  TORCH_CHECK(page_size > 0 && page_size % kGroup == 0 && dim > 0 && dim % kGroup == 0, op,
              ": exact_k must have pages and heads of a multiple of ", kGroup, ", not ", exact_k.sizes());
  check_dims(op, "k_codes", k_codes, 5);
  const int64_t pages = k_codes.size(0), tile = k_codes.size(4), bits = 8 * tile / (kTileSide * kTileSide);
  TORCH_CHECK(tile == 64 || tile == 96 || tile == 128, op,
              ": k_codes must have tiles of 64 bytes (2 bits), 96 (3 bits) or 128 (4 bits), not ", tile);
  check_sealed(op, "k_codes", k_codes, at::kByte, {pages, heads, page_size / kTileSide, dim / kTileSide, tile});
  check_sealed(op, "v_codes", v_codes, at::kByte, {pages, heads, dim / kTileSide, page_size / kTileSide, tile});
  check_sealed(op, "k_groups", k_groups, at::kHalf, {pages, heads, page_size / kGroup, 2, dim});
  check_sealed(op, "v_groups", v_groups, at::kHalf, {pages, heads, dim / kGroup, 2, page_size});
  return {page_size, heads, dim, bits};
}

}  // namespace kvforge
