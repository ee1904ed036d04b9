// kvforge::rope_paged_kv_write on CPU: checks, then the kernel over ranges of tokens.
#include "rope_paged_kv_write/cpu_kernel.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <optional>

#include "native/checks.h"
#include "native/isa.h"
#include "native/rotated_keys.h"
#include "native/workspace.h"

namespace kvforge {
namespace {

constexpr const char* kOp = "rope_paged_kv_write";
constexpr int64_t kElementsPerTask = 32768;

auto kernel() -> decltype(&isa_portable::write_tokens) {
#if defined(__x86_64__)
  switch (current_isa()) {
    case Isa::avx512_bf16:
    case Isa::avx512_vnni:
    case Isa::avx512: return &isa_avx512::write_tokens;
    case Isa::avx2: return &isa_avx2::write_tokens;
    case Isa::portable: break;
  }
#endif
  return &isa_portable::write_tokens;
}

at::Tensor source(const char* name, const at::Tensor& t, const at::Tensor& k, const at::Tensor& pool) {
  check_float(kOp, name, t, 3);
  TORCH_CHECK(
      t.size(1) == pool.size(2) && t.size(2) == head_dim_of(pool), kOp, ": ", name, " must be [T, ", pool.size(2), ", ",
      head_dim_of(pool), "] to fit the pools, not ", t.sizes());
  TORCH_CHECK(
      t.size(0) == k.size(0) && t.scalar_type() == k.scalar_type(), kOp, ": ", name,
      " must have as many tokens and the same dtype as k");
  return t.stride(2) == 1 ? t : t.contiguous();
}

KvSource source_of(const at::Tensor& t) { return {t.const_data_ptr(), t.stride(0), t.stride(1)}; }

KvTarget target_of(const at::Tensor& pool, const std::optional<at::Tensor>& scales, double scale, bool rotated) {
  KvTarget target{pool.mutable_data_ptr(), dtype(pool), pool.stride(0), pool.stride(1), pool.stride(2), nullptr, 0, 0, 0,
                  static_cast<float>(scale), rotated || is_int4(pool)};
  if (scales.has_value()) {
    target.scales = scales->mutable_data_ptr<float>();
    target.scales_page_stride = scales->stride(0);
    target.scales_slot_stride = scales->stride(1);
    target.scales_head_stride = scales->stride(2);
  }
  return target;
}

}  // namespace

void rope_paged_kv_write(
    const at::Tensor& k_in, const at::Tensor& v_in, const at::Tensor& cos_in, const at::Tensor& sin_in,
    const at::Tensor& slot_mapping_in, at::Tensor& k_pool, at::Tensor& v_pool,
    const std::optional<at::Tensor>& k_scales, const std::optional<at::Tensor>& v_scales, double k_scale,
    double v_scale, bool rotates_keys) {
  check_pools(kOp, k_pool, v_pool, true);
  check_scales(kOp, narrower(k_pool, v_pool), k_scales, v_scales, k_scale, v_scale);
  check_rotated(kOp, rotates_keys, k_pool, k_scales);
  const int64_t page_size = k_pool.size(1), kv_heads = k_pool.size(2), head_dim = head_dim_of(k_pool);
  TORCH_CHECK(head_dim % 2 == 0, kOp, ": k_pool must have an even head_dim, not ", head_dim);
  const at::Tensor k = source("k", k_in, k_in, k_pool);
  const at::Tensor v = source("v", v_in, k_in, v_pool);
  const int64_t tokens = k.size(0);
  const at::Tensor cos = float32_tensor(kOp, "cos", cos_in, {tokens, head_dim / 2});
  const at::Tensor sin = float32_tensor(kOp, "sin", sin_in, {tokens, head_dim / 2});
  const at::Tensor slot_mapping = int32_tensor(kOp, "slot_mapping", slot_mapping_in, {tokens});
  if (tokens == 0) return;

  const int32_t* slots = slot_mapping.const_data_ptr<int32_t>();
  const int64_t largest = *std::max_element(slots, slots + tokens);
  TORCH_CHECK(
      largest < k_pool.size(0) * page_size, kOp, ": slot_mapping holds slot ", largest, " but the pools have ",
      k_pool.size(0), " pages of ", page_size);

  const KvWrite args{
      .k = source_of(k),
      .v = source_of(v),
      .source_bf16 = k.scalar_type() == at::kBFloat16,
      .cos = cos.const_data_ptr<float>(),
      .sin = sin.const_data_ptr<float>(),
      .slot_mapping = slots,
      .k_pool = target_of(k_pool, k_scales, k_scale, rotates_keys),
      .v_pool = target_of(v_pool, v_scales, v_scale, false),
      .page_size = page_size,
      .kv_heads = kv_heads,
      .head_dim = head_dim,
  };
  const auto write_tokens = kernel();
  const int64_t grain = std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(1, kv_heads * head_dim));
  at::parallel_for(0, tokens, grain, [&](int64_t begin, int64_t end) {
    thread_local Workspace workspace;
    write_tokens(args, begin, end, reinterpret_cast<float*>(workspace.get(head_dim * sizeof(float))));
  });
}

}  // namespace kvforge
