// kvforge::latent_kv_write on CPU: checks, then the kernel over ranges of tokens.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <optional>

#include "latent_kv_write/cpu_kernel.h"
#include "native/checks.h"
#include "native/isa.h"
#include "native/workspace.h"

namespace kvforge {
namespace {

constexpr const char* kOp = "latent_kv_write";
constexpr int64_t kElementsPerTask = 32768;

auto kernel() -> decltype(&isa_portable::write_rows) {
#if defined(__x86_64__)
  switch (current_isa()) {
    case Isa::avx512_bf16:
    case Isa::avx512_vnni:
    case Isa::avx512: return &isa_avx512::write_rows;
    case Isa::avx2: return &isa_avx2::write_rows;
    case Isa::portable: break;
  }
#endif
  return &isa_portable::write_rows;
}

}  // namespace

void latent_kv_write(
    const at::Tensor& k_in, const at::Tensor& cos_in, const at::Tensor& sin_in, const at::Tensor& slot_mapping_in,
    at::Tensor& k_pool, const std::optional<at::Tensor>& k_scales) {
  check_pools(kOp, k_pool, k_pool);
  check_scales(kOp, k_pool, k_scales, k_scales, 1.0, 1.0);
  TORCH_CHECK(k_scales.has_value() == is_8_bit(k_pool), kOp, ": k_scales must be given for 8-bit pools");
  check_float(kOp, "k", k_in, 3);
  const int64_t tokens = k_in.size(0), width = k_pool.size(3), page_size = k_pool.size(1);
  TORCH_CHECK(k_pool.size(2) == 1, kOp, ": k_pool must have one KV head, not ", k_pool.size(2));
  TORCH_CHECK(k_in.size(1) == 1 && k_in.size(2) == width, kOp, ": k must be [T, 1, ", width, "] to fit k_pool, not ",
              k_in.sizes());
  check_dims(kOp, "cos", cos_in, 2);
  const int64_t half = cos_in.size(1);
  TORCH_CHECK(half > 0 && 2 * half <= width, kOp, ": cos must have from 1 to ", width / 2, " columns, not ", half);
  const at::Tensor k = k_in.stride(2) == 1 ? k_in : k_in.contiguous();
  const at::Tensor cos = float32_tensor(kOp, "cos", cos_in, {tokens, half});
  const at::Tensor sin = float32_tensor(kOp, "sin", sin_in, {tokens, half});
  const at::Tensor slot_mapping = int32_tensor(kOp, "slot_mapping", slot_mapping_in, {tokens});
  if (tokens == 0) return;

  const int32_t* slots = slot_mapping.const_data_ptr<int32_t>();
  const int64_t largest = *std::max_element(slots, slots + tokens);
  TORCH_CHECK(
      largest < k_pool.size(0) * page_size, kOp, ": slot_mapping holds slot ", largest, " but the pool has ",
      k_pool.size(0), " pages of ", page_size);

  const LatentWrite args{
      .rows = k.const_data_ptr(),
      .token_stride = k.stride(0),
      .source_bf16 = k.scalar_type() == at::kBFloat16,
      .cos = cos.const_data_ptr<float>(),
      .sin = sin.const_data_ptr<float>(),
      .slot_mapping = slots,
      .pool = k_pool.mutable_data_ptr(),
      .page_stride = k_pool.stride(0),
      .slot_stride = k_pool.stride(1),
      .scales = k_scales.has_value() ? k_scales->mutable_data_ptr<float>() : nullptr,
      .scales_page_stride = k_scales.has_value() ? k_scales->stride(0) : 0,
      .scales_slot_stride = k_scales.has_value() ? k_scales->stride(1) : 0,
      .pool_dtype = dtype(k_pool),
      .page_size = page_size,
      .width = width,
      .rope_dim = 2 * half,
  };
  const auto write_rows = kernel();
  const int64_t grain = std::max<int64_t>(1, kElementsPerTask / width);
  at::parallel_for(0, tokens, grain, [&](int64_t begin, int64_t end) {
    thread_local Workspace workspace;
    write_rows(args, begin, end, reinterpret_cast<float*>(workspace.get(width * sizeof(float))));
  });
}

}  // namespace kvforge
