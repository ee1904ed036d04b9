// kvforge::expert_linear on CPU: checks, then the products with packed weights, or torch's with those that are not.
#include <ATen/core/Tensor.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/silu.h>

#include <optional>

#include "expert_linear/cpu_packed.h"
#include "native/checks.h"
#include "native/empty.h"

namespace kvforge {
namespace {

constexpr const char* kOp = "expert_linear";

at::Tensor indices(const std::vector<int32_t>& rows, int64_t begin, int64_t end) {
  at::Tensor index = empty_tensor({end - begin}, at::kInt);
  std::copy(rows.begin() + begin, rows.begin() + end, index.mutable_data_ptr<int32_t>());
  return index;
}

// Experts one after the other; x is [rows, depth], out [rows of the result, out_features].
void multiply_plain(const at::Tensor& x, const at::Tensor& weight, const ExpertRows& rows, bool gated,
                    at::Tensor out) {
  for (int64_t e = 0; e < weight.size(0); ++e) {
    const int64_t begin = rows.start[e], end = rows.start[e + 1];
    if (begin == end) continue;
    at::Tensor y = at::linear(at::index_select(x, 0, indices(rows.x_row, begin, end)), weight[e]);
    if (gated) {
      const auto halves = y.chunk(2, 1);
      y = at::mul(at::silu(halves[0]), halves[1]);
    }
    out.index_copy_(0, indices(rows.out_row, begin, end).to(at::kLong), y.to(out.scalar_type()));
  }
}

}  // namespace

at::Tensor expert_linear(
    const at::Tensor& x_in, const at::Tensor& weight, const std::optional<at::Tensor>& scales_in,
    const at::Tensor& expert_ids, int64_t out_features, bool gated, bool float32_out) {
  const at::Tensor ids = int32_tensor(kOp, "expert_ids", expert_ids, {-1, -1});
  const int64_t tokens = ids.size(0), active = ids.size(1), count = ids.numel();
  TORCH_CHECK(active > 0, kOp, ": expert_ids must name an expert for each token");
  TORCH_CHECK(is_f32_or_bf16(x_in), kOp, ": x must be float32 or bfloat16, not ", x_in.scalar_type());
  const bool is_wide = x_in.dim() == 3;
  TORCH_CHECK((is_wide || x_in.dim() == 2) && x_in.size(0) == tokens && (!is_wide || x_in.size(1) == active), kOp,
              ": x must have shape [", tokens, ", K] or [", tokens, ", ", active, ", K] to fit expert_ids, not ",
              x_in.sizes());
  const int64_t depth = x_in.size(-1);
  TORCH_CHECK(depth > 0, kOp, ": x must have columns");
  TORCH_CHECK(x_in.stride(-1) == 1 || x_in.numel() <= 1 || depth == 1, kOp, ": x must be contiguous in its last dimension");
  TORCH_CHECK(out_features > 0, kOp, ": out_features must be positive, not ", out_features);
  TORCH_CHECK(weight.dim() >= 3, kOp, ": weight must have the experts as its first dimension, not shape ", weight.sizes());
  const int64_t experts = weight.size(0);
  const int32_t* const id = ids.const_data_ptr<int32_t>();
  for (int64_t i = 0; i < count; ++i)
    TORCH_CHECK(id[i] >= 0 && id[i] < experts, kOp, ": expert_ids holds expert ", id[i], " but weight has ", experts);
  const at::Tensor x = is_wide ? x_in.reshape({count, depth}) : x_in;
  at::Tensor out = empty_tensor({tokens, active, out_features}, float32_out ? at::kFloat : x.scalar_type());
  const bool plain = weight.dim() == 3;
  TORCH_CHECK(!plain || weight.scalar_type() == x.scalar_type(), kOp, ": weight must have x's dtype, ",
              x.scalar_type(), ", or be packed, not ", weight.scalar_type());
  TORCH_CHECK(plain || x.scalar_type() == at::kBFloat16, kOp, ": x must be bfloat16 with packed weights, not ",
              x.scalar_type());
  if (plain) {
    const std::vector<int64_t> shape = {experts, out_features * (gated ? 2 : 1), depth};
    TORCH_CHECK(weight.sizes() == at::IntArrayRef(shape), kOp, ": weight must have shape ", at::IntArrayRef(shape), " to fit x and out_features, not ",
                weight.sizes());
    TORCH_CHECK(!scales_in.has_value(), kOp, ": scales must be given with int8 and int4 weights, and only with them");
    multiply_plain(x, weight, ExpertRows(id, count, experts, is_wide ? 1 : active), gated,
                   out.view({count, out_features}));
    return out;
  }
  const Weights weights = weights_of(kOp, weight);
  const int64_t width = gated ? kPanel / 2 : kPanel, panels = (out_features - 1) / width + 1;
  check_weight(kOp, weight, weights, {experts}, depth, panels);
  TORCH_CHECK(scales_in.has_value() == (weights != Weights::bf16), kOp,
              ": scales must be given with int8 and int4 weights, and only with them");
  const auto [kinds, of_kind] = scales_shape(weights, panels);
  at::Tensor scales;
  if (scales_in.has_value()) scales = float32_tensor(kOp, "scales", *scales_in, {experts, kinds, of_kind});
  if (count == 0) return out;
  const float* const scale = scales.defined() ? scales.const_data_ptr<float>() : nullptr;
  multiply_experts(
      {
          .x = static_cast<const uint16_t*>(x.const_data_ptr()),
          .x_stride = x.stride(0),
          .rows = 0,
          .depth = depth,
          .outputs = out_features,
          .panels = panels,
          .weight = static_cast<const char*>(weight.const_data_ptr()),
          .weight_scales = scale,
          .weight_sums = weights == Weights::int8 ? scale + of_kind : nullptr,
          .bias = nullptr,
          .norm = nullptr,
          .residual = nullptr,
          .residual_stride = 0,
          .out = out.mutable_data_ptr(),
          .eps = 0.0f,
          .gated = gated,
          .float32_out = float32_out,
      },
      weights, weight.stride(0) * static_cast<int64_t>(weight.element_size()), kinds * of_kind,
      ExpertRows(id, count, experts, is_wide ? 1 : active));
  return out;
}

}  // namespace kvforge
