// Checks of operator arguments; every message names the operator and the argument.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

namespace kvforge {

inline bool is_f32_or_bf16(const at::Tensor& t) {
  return t.scalar_type() == at::kFloat || t.scalar_type() == at::kBFloat16;
}

inline void check_float(const char* op, const char* name, const at::Tensor& t, int64_t dims) {
  TORCH_CHECK(t.dim() == dims, op, ": ", name, " must have ", dims, " dimensions, not ", t.dim());
  TORCH_CHECK(is_f32_or_bf16(t), op, ": ", name, " must be float32 or bfloat16, not ", t.scalar_type());
}

// An int32 tensor of the given shape (-1: any size), contiguous in the result.
inline at::Tensor int32_tensor(const char* op, const char* name, const at::Tensor& t, at::IntArrayRef shape) {
  TORCH_CHECK(t.scalar_type() == at::kInt, op, ": ", name, " must be int32, not ", t.scalar_type());
  bool matches = t.dim() == static_cast<int64_t>(shape.size());
  for (size_t i = 0; matches && i < shape.size(); ++i) matches = shape[i] < 0 || shape[i] == t.size(i);
  TORCH_CHECK(matches, op, ": ", name, " must have shape ", shape, ", not ", t.sizes());
  return t.contiguous();
}

// Both pools: [pages, page_size, kv_heads, head_dim], same shape and dtype, head_dim contiguous.
inline void check_pools(const char* op, const at::Tensor& k_pool, const at::Tensor& v_pool) {
  check_float(op, "k_pool", k_pool, 4);
  check_float(op, "v_pool", v_pool, 4);
  TORCH_CHECK(
      k_pool.sizes() == v_pool.sizes(), op, ": v_pool must have the shape of k_pool ", k_pool.sizes(), ", not ",
      v_pool.sizes());
  TORCH_CHECK(
      k_pool.scalar_type() == v_pool.scalar_type(), op, ": v_pool must have the dtype of k_pool ",
      k_pool.scalar_type(), ", not ", v_pool.scalar_type());
  TORCH_CHECK(k_pool.stride(3) == 1, op, ": k_pool must be contiguous in its last dimension");
  TORCH_CHECK(v_pool.stride(3) == 1, op, ": v_pool must be contiguous in its last dimension");
}

}  // namespace kvforge
