// kvforge::short_conv on CPU: checks, then the kernel over sequences and blocks of channels.
#include <ATen/core/Tensor.h>

#include "native/dynamic_for.h"
#include "native/empty.h"
#include "native/isa.h"
#include "native/states.h"
#include "native/workspace.h"
#include "short_conv/cpu_kernel.h"

namespace kvforge {
namespace {

constexpr const char* kOp = "short_conv";
constexpr int64_t kElementsPerThread = 1 << 15;  // that pay for waking a thread

auto kernel() -> decltype(&isa_portable::convolve) {
#if defined(__x86_64__)
  switch (current_isa()) {
    case Isa::avx512_bf16:
    case Isa::avx512_vnni:
    case Isa::avx512: return &isa_avx512::convolve;
    case Isa::avx2: return &isa_avx2::convolve;
    case Isa::portable: break;
  }
#endif
  return &isa_portable::convolve;
}

}  // namespace

at::Tensor short_conv(
    const at::Tensor& x_in, const at::Tensor& weight_in, const at::Tensor& query_start_in,
    const at::Tensor& state_read_in, const at::Tensor& state_write_in, at::Tensor& conv_pool, bool activates,
    const std::optional<at::Tensor>& bias_in) {
  check_float(kOp, "x", x_in, 2);
  check_float(kOp, "weight", weight_in, 2);
  check_float(kOp, "conv_pool", conv_pool, 3);
  const int64_t tokens = x_in.size(0), channels = x_in.size(1), width = weight_in.size(0);
  TORCH_CHECK(width >= 2 && weight_in.size(1) == channels && weight_in.scalar_type() == x_in.scalar_type(), kOp,
              ": weight must be [2 or more, ", channels, "] in the dtype of x, not ", weight_in.sizes());
  TORCH_CHECK(conv_pool.size(1) == width - 1 && conv_pool.size(2) == channels && conv_pool.is_contiguous() &&
                  conv_pool.scalar_type() == x_in.scalar_type(),
              kOp, ": conv_pool must be [rows, ", width - 1, ", ", channels, "], contiguous and in the dtype of x, not ",
              conv_pool.sizes());
  if (bias_in)
    TORCH_CHECK(bias_in->dim() == 1 && bias_in->size(0) == channels && bias_in->scalar_type() == x_in.scalar_type(),
                kOp, ": bias must be [", channels, "] in the dtype of x, not ", bias_in->sizes());
  const at::Tensor bias = bias_in ? bias_in->contiguous() : at::Tensor();
  const at::Tensor query_start = starts_tensor(kOp, "query_start", query_start_in, tokens);
  const int64_t sequences = query_start.size(0) - 1, rows = conv_pool.size(0);
  const at::Tensor state_read = rows_tensor(kOp, "state_read", state_read_in, sequences, rows);
  const at::Tensor state_write = rows_tensor(kOp, "state_write", state_write_in, tokens, rows);
  const at::Tensor x = x_in.stride(1) == 1 ? x_in : x_in.contiguous(), weight = weight_in.contiguous();
  at::Tensor out = empty_tensor({tokens, channels}, x.scalar_type());
  const ShortConv args{
      .x = x.const_data_ptr(),
      .token_stride = x.stride(0),
      .weight = weight.const_data_ptr(),
      .is_bf16 = x.scalar_type() == at::kBFloat16,
      .query_start = query_start.const_data_ptr<int32_t>(),
      .state_read = state_read.const_data_ptr<int32_t>(),
      .state_write = state_write.const_data_ptr<int32_t>(),
      .pool = conv_pool.mutable_data_ptr(),
      .out = out.mutable_data_ptr(),
      .width = width,
      .channels = channels,
      .activates = activates,
      .bias = bias_in ? bias.const_data_ptr() : nullptr,
  };
  const auto convolve = kernel();
  const int64_t blocks = (channels + kConvBlock - 1) / kConvBlock;
  dynamic_for(sequences * blocks, 1 + tokens * channels / kElementsPerThread, [&](int64_t task) {
    thread_local Workspace workspace;
    float* scratch = reinterpret_cast<float*>(workspace.get(conv_scratch(width) * sizeof(float)));
    convolve(args, task / blocks, task % blocks * kConvBlock, scratch);
  });
  return out;
}

}  // namespace kvforge
