// Checks of operator arguments; every message names the operator and the argument.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <optional>

#include "native/dtype.h"

namespace kvforge {

inline bool is_f32_or_bf16(const at::Tensor& t) {
  return t.scalar_type() == at::kFloat || t.scalar_type() == at::kBFloat16;
}

inline bool is_8_bit(const at::Tensor& t) {
  return t.scalar_type() == at::kFloat8_e4m3fn || t.scalar_type() == at::kChar;
}

// Two numbers in a byte; such pools have scales.
inline bool is_int4(const at::Tensor& t) { return t.scalar_type() == at::kByte; }

// Of a checked tensor.
inline Dtype dtype(const at::Tensor& t) {
  switch (t.scalar_type()) {
    case at::kBFloat16: return Dtype::bfloat16;
    case at::kFloat8_e4m3fn: return Dtype::fp8;
    case at::kChar: return Dtype::int8;
    case at::kByte: return Dtype::int4;
    default: return Dtype::float32;
  }
}

inline void check_dims(const char* op, const char* name, const at::Tensor& t, int64_t dims) {
  TORCH_CHECK(t.dim() == dims, op, ": ", name, " must have ", dims, " dimensions, not ", t.dim());
}

inline void check_float(const char* op, const char* name, const at::Tensor& t, int64_t dims) {
  check_dims(op, name, t, dims);
  TORCH_CHECK(is_f32_or_bf16(t), op, ": ", name, " must be float32 or bfloat16, not ", t.scalar_type());
}

// A tensor of the given dtype and shape (-1: any size).
inline void check_tensor(const char* op, const char* name, const at::Tensor& t, at::ScalarType type,
                         at::IntArrayRef shape) {
  TORCH_CHECK(t.scalar_type() == type, op, ": ", name, " must be ", type == at::kInt ? "int32" : "float32", ", not ",
              t.scalar_type());
  bool matches = t.dim() == static_cast<int64_t>(shape.size());
  for (size_t i = 0; matches && i < shape.size(); ++i) matches = shape[i] < 0 || shape[i] == t.size(i);
  TORCH_CHECK(matches, op, ": ", name, " must have shape ", shape, ", not ", t.sizes());
}

// An int32 tensor of the given shape (-1: any size), contiguous in the result.
inline at::Tensor int32_tensor(const char* op, const char* name, const at::Tensor& t, at::IntArrayRef shape) {
  check_tensor(op, name, t, at::kInt, shape);
  return t.contiguous();
}

inline at::Tensor float32_tensor(const char* op, const char* name, const at::Tensor& t, at::IntArrayRef shape) {
  check_tensor(op, name, t, at::kFloat, shape);
  return t.contiguous();
}

// Where each of the packed sequences starts: [sequences + 1] int32 from 0 to `total`, never decreasing.
inline at::Tensor starts_tensor(const char* op, const char* name, const at::Tensor& t, int64_t total) {
  TORCH_CHECK(t.dim() == 1 && t.size(0) > 0, op, ": ", name, " must have shape [sequences + 1], not ", t.sizes());
  const at::Tensor starts = int32_tensor(op, name, t, {-1});
  const int32_t* start = starts.const_data_ptr<int32_t>();
  const int64_t sequences = starts.size(0) - 1;
  TORCH_CHECK(start[0] == 0 && start[sequences] == total, op, ": ", name, " must go from 0 to ", total,
              ", the number of packed items, not from ", start[0], " to ", start[sequences]);
  for (int64_t s = 0; s < sequences; ++s)
    TORCH_CHECK(start[s] <= start[s + 1], op, ": ", name, " must not decrease, but does at sequence ", s);
  return starts;
}

// Numbers of a head of a pool.
inline int64_t head_dim_of(const at::Tensor& pool) { return is_int4(pool) ? 2 * pool.size(3) : pool.size(3); }

// Both pools: [pages, page_size, kv_heads, head_dim], same shape and dtype, head_dim contiguous. Where the operator reads
// int4, of head_dim / 2 bytes, one may be of int4 and the other of int8.
inline void check_pools(const char* op, const at::Tensor& k_pool, const at::Tensor& v_pool, bool reads_int4 = false) {
  check_dims(op, "k_pool", k_pool, 4);
  check_dims(op, "v_pool", v_pool, 4);
  TORCH_CHECK(
      is_f32_or_bf16(k_pool) || is_8_bit(k_pool) || (reads_int4 && is_int4(k_pool)), op,
      ": k_pool must be float32, bfloat16, float8_e4m3fn", reads_int4 ? ", int8 or uint8" : " or int8", ", not ",
      k_pool.scalar_type());
  const auto is_integer = [](const at::Tensor& pool) { return pool.scalar_type() == at::kChar || is_int4(pool); };
  TORCH_CHECK(
      k_pool.scalar_type() == v_pool.scalar_type() || (reads_int4 && is_integer(k_pool) && is_integer(v_pool)), op,
      ": v_pool must have the dtype of k_pool ", k_pool.scalar_type(), reads_int4 ? ", or both int8 or uint8" : "",
      ", not ", v_pool.scalar_type());
  TORCH_CHECK(
      k_pool.sizes().slice(0, 3) == v_pool.sizes().slice(0, 3) && head_dim_of(k_pool) == head_dim_of(v_pool), op,
      ": v_pool must have the shape of k_pool ", k_pool.sizes(), ", not ", v_pool.sizes());
  TORCH_CHECK(k_pool.stride(3) == 1, op, ": k_pool must be contiguous in its last dimension");
  TORCH_CHECK(v_pool.stride(3) == 1, op, ": v_pool must be contiguous in its last dimension");
}

// The one of two checked pools that asks for more: int4 for scales of its rows.
inline const at::Tensor& narrower(const at::Tensor& k_pool, const at::Tensor& v_pool) {
  return is_int4(k_pool) ? k_pool : v_pool;
}

// The scales of checked pools: tensors [pages, page_size, kv_heads] float32 of 8-bit pools, or a float of them.
inline void check_scales(const char* op, const at::Tensor& pool, const std::optional<at::Tensor>& k_scales,
                         const std::optional<at::Tensor>& v_scales, double k_scale, double v_scale) {
  TORCH_CHECK(k_scales.has_value() || !v_scales.has_value(), op, ": k_scales must be given where v_scales are");
  TORCH_CHECK(v_scales.has_value() || !k_scales.has_value(), op, ": v_scales must be given where k_scales are");
  if (k_scales.has_value()) {
    TORCH_CHECK(is_8_bit(pool) || is_int4(pool), op, ": k_scales are for 8-bit pools, not ", pool.scalar_type());
    check_tensor(op, "k_scales", *k_scales, at::kFloat, pool.sizes().slice(0, 3));
    check_tensor(op, "v_scales", *v_scales, at::kFloat, pool.sizes().slice(0, 3));
  }
  TORCH_CHECK(k_scales.has_value() || !is_int4(pool), op, ": k_scales must be given for pools of uint8");
  const auto check = [&](const char* name, double scale) {
    if (!is_8_bit(pool) || k_scales.has_value())
      TORCH_CHECK(scale == 1.0, op, ": ", name, " must be 1 unless 8-bit pools have no scales of their own, not ", scale);
    const float stored = static_cast<float>(scale);
    TORCH_CHECK(std::isnormal(stored) && stored > 0, op, ": ", name, " must be a positive float32, not ", scale);
  };
  check("k_scale", k_scale);
  check("v_scale", v_scale);
}

}  // namespace kvforge
