// kvforge::rope_paged_kv_write on CPU: checks, then the kernel over ranges of tokens.
#include "rope_paged_kv_write/cpu_kernel.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>

#include "native/checks.h"
#include "native/isa.h"
#include "native/operators.h"

namespace kvforge {
namespace {

constexpr const char* kOp = "rope_paged_kv_write";
constexpr int64_t kElementsPerTask = 32768;

auto kernel() -> decltype(&isa_portable::write_tokens) {
#if defined(__x86_64__)
  switch (current_isa()) {
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
      t.size(1) == pool.size(2) && t.size(2) == pool.size(3), kOp, ": ", name, " must be [T, ", pool.size(2), ", ",
      pool.size(3), "] to fit the pools, not ", t.sizes());
  TORCH_CHECK(
      t.size(0) == k.size(0) && t.scalar_type() == k.scalar_type(), kOp, ": ", name,
      " must have as many tokens and the same dtype as k");
  return t.stride(2) == 1 ? t : t.contiguous();
}

at::Tensor table(const char* name, const at::Tensor& t, int64_t tokens, int64_t half) {
  TORCH_CHECK(t.scalar_type() == at::kFloat, kOp, ": ", name, " must be float32, not ", t.scalar_type());
  TORCH_CHECK(
      t.dim() == 2 && t.size(0) == tokens && t.size(1) == half, kOp, ": ", name, " must have shape [", tokens, ", ",
      half, "], not ", t.sizes());
  return t.contiguous();
}

}  // namespace

void rope_paged_kv_write(
    const at::Tensor& k_in, const at::Tensor& v_in, const at::Tensor& cos_in, const at::Tensor& sin_in,
    const at::Tensor& slot_mapping_in, at::Tensor& k_pool, at::Tensor& v_pool,
    const std::optional<at::Tensor>&, const std::optional<at::Tensor>&, double, double) {
  check_pools(kOp, k_pool, v_pool);
  const int64_t page_size = k_pool.size(1), kv_heads = k_pool.size(2), head_dim = k_pool.size(3);
  TORCH_CHECK(head_dim % 2 == 0, kOp, ": k_pool must have an even head_dim, not ", head_dim);
  const at::Tensor k = source("k", k_in, k_in, k_pool);
  const at::Tensor v = source("v", v_in, k_in, v_pool);
  const int64_t tokens = k.size(0);
  const at::Tensor cos = table("cos", cos_in, tokens, head_dim / 2);
  const at::Tensor sin = table("sin", sin_in, tokens, head_dim / 2);
  const at::Tensor slot_mapping = int32_tensor(kOp, "slot_mapping", slot_mapping_in, {tokens});
  if (tokens == 0) return;

  const int32_t* slots = slot_mapping.const_data_ptr<int32_t>();
  const int64_t largest = *std::max_element(slots, slots + tokens);
  TORCH_CHECK(
      largest < k_pool.size(0) * page_size, kOp, ": slot_mapping holds slot ", largest, " but the pools have ",
      k_pool.size(0), " pages of ", page_size);

  const KvWrite args{
      .k = k.const_data_ptr(),
      .v = v.const_data_ptr(),
      .source_bf16 = k.scalar_type() == at::kBFloat16,
      .k_token_stride = k.stride(0),
      .k_head_stride = k.stride(1),
      .v_token_stride = v.stride(0),
      .v_head_stride = v.stride(1),
      .cos = cos.const_data_ptr<float>(),
      .sin = sin.const_data_ptr<float>(),
      .slot_mapping = slots,
      .k_pool = k_pool.mutable_data_ptr(),
      .v_pool = v_pool.mutable_data_ptr(),
      .pool_bf16 = k_pool.scalar_type() == at::kBFloat16,
      .k_page_stride = k_pool.stride(0),
      .k_slot_stride = k_pool.stride(1),
      .k_pool_head_stride = k_pool.stride(2),
      .v_page_stride = v_pool.stride(0),
      .v_slot_stride = v_pool.stride(1),
      .v_pool_head_stride = v_pool.stride(2),
      .page_size = page_size,
      .kv_heads = kv_heads,
      .head_dim = head_dim,
  };
  const auto write_tokens = kernel();
  const int64_t grain = std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(1, kv_heads * head_dim));
  at::parallel_for(0, tokens, grain, [&](int64_t begin, int64_t end) { write_tokens(args, begin, end); });
}

}  // namespace kvforge
