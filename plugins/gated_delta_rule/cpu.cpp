// kvforge::gated_delta_rule on CPU: checks, the gates of all tokens, then the kernel over sequences, heads and columns.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <cmath>

#include "gated_delta_rule/cpu_kernel.h"
#include "native/dynamic_for.h"
#include "native/empty.h"
#include "native/isa.h"
#include "native/states.h"
#include "native/subnormals.h"
#include "native/workspace.h"

namespace kvforge {
namespace {

constexpr const char* kOp = "gated_delta_rule";
constexpr int64_t kGatesPerTask = 1 << 10;
constexpr int64_t kNumbersPerThread = 1 << 17;  // of states, a token each, that pay for waking a thread

struct Kernel {
  decltype(&isa_portable::columns) columns;
  decltype(&isa_portable::norm) norm;
  decltype(&isa_portable::recur) recur;
  decltype(&isa_portable::decay) decay;
};

Kernel kernel() {
#if defined(__x86_64__)
  switch (current_isa()) {
    case Isa::avx512_bf16:
    case Isa::avx512_vnni:
    case Isa::avx512: return {&isa_avx512::columns, &isa_avx512::norm, &isa_avx512::recur, &isa_avx512::decay};
    case Isa::avx2: return {&isa_avx2::columns, &isa_avx2::norm, &isa_avx2::recur, &isa_avx2::decay};
    case Isa::portable: break;
  }
#endif
  return {&isa_portable::columns, &isa_portable::norm, &isa_portable::recur, &isa_portable::decay};
}

}  // namespace

at::Tensor gated_delta_rule(
    const at::Tensor& qkv_in, const at::Tensor& gates_in, const at::Tensor& decay_log_in,
    const at::Tensor& decay_bias_in, const at::Tensor& query_start_in, const at::Tensor& state_read_in,
    const at::Tensor& state_write_in, at::Tensor& state_pool, bool has_queries) {
  check_float(kOp, "qkv", qkv_in, 2);
  check_tensor(kOp, "state_pool", state_pool, at::kFloat, {-1, -1, -1, -1});
  TORCH_CHECK(state_pool.is_contiguous(), kOp, ": state_pool must be contiguous");
  const int64_t tokens = qkv_in.size(0), rows = state_pool.size(0), heads = state_pool.size(1);
  const int64_t key_dim = state_pool.size(2), value_dim = state_pool.size(3);
  const int64_t of_keys = qkv_in.size(1) - heads * value_dim;
  const int64_t of_head = (has_queries ? 2 : 1) * key_dim;  // columns of a key head
  TORCH_CHECK(heads > 0 && key_dim > 0 && of_keys > 0 && of_keys % of_head == 0, kOp, ": qkv must have ",
              heads * value_dim, " columns of values and some of keys", has_queries ? " and queries" : "", ", not ",
              qkv_in.size(1));
  const int64_t key_heads = of_keys / of_head;
  TORCH_CHECK(heads % key_heads == 0, kOp, ": qkv has ", key_heads, " key heads, which ", heads,
              " value heads are not a multiple of");
  const bool by_channel = gates_in.dim() == 2 && gates_in.size(1) > 2 * heads;
  const int64_t decays = by_channel ? key_dim : 1, of_token = heads * decays, gate_stride = heads + of_token;
  const at::Tensor gates = float32_tensor(kOp, "gates", gates_in, {tokens, gate_stride});
  const at::Tensor decay_log = float32_tensor(kOp, "decay_log", decay_log_in, {heads});
  const at::Tensor decay_bias = float32_tensor(kOp, "decay_bias", decay_bias_in, {of_token});
  const at::Tensor query_start = starts_tensor(kOp, "query_start", query_start_in, tokens);
  const int64_t sequences = query_start.size(0) - 1;
  const at::Tensor state_read = rows_tensor(kOp, "state_read", state_read_in, sequences, rows);
  const at::Tensor state_write = rows_tensor(kOp, "state_write", state_write_in, tokens, rows);
  const at::Tensor qkv = qkv_in.stride(1) == 1 ? qkv_in : qkv_in.contiguous();
  at::Tensor out = empty_tensor({has_queries ? tokens : 0, heads, value_dim}, qkv.scalar_type());
  const int64_t numbers = (tokens + 1) * of_token + tokens * (heads + 3 * key_heads);
  at::Tensor factors = empty_tensor({numbers}, gates.scalar_type());
  float *decay = factors.mutable_data_ptr<float>(), *rate = decay + tokens * of_token, *speed = rate + tokens * heads;
  const float *gate = gates.const_data_ptr<float>(), *log = decay_log.const_data_ptr<float>();
  const float* bias = decay_bias.const_data_ptr<float>();
  for (int64_t i = 0; i < of_token; ++i) speed[i] = i % decays ? speed[i - 1] : std::exp(log[i / decays]);
  const DeltaRule args{
      .qkv = qkv.const_data_ptr(),
      .token_stride = qkv.stride(0),
      .is_bf16 = qkv.scalar_type() == at::kBFloat16,
      .has_queries = has_queries,
      .by_channel = by_channel,
      .decay = decay,
      .rate = rate,
      .query_start = query_start.const_data_ptr<int32_t>(),
      .state_read = state_read.const_data_ptr<int32_t>(),
      .state_write = state_write.const_data_ptr<int32_t>(),
      .pool = state_pool.mutable_data_ptr<float>(),
      .out = out.mutable_data_ptr(),
      .key_heads = key_heads,
      .value_heads = heads,
      .key_dim = key_dim,
      .value_dim = value_dim,
      .norms = speed + of_token,
  };
  const Kernel chosen = kernel();
  at::parallel_for(0, tokens, std::max<int64_t>(1, kGatesPerTask / of_token), [&](int64_t begin, int64_t end) {
    thread_local Workspace workspace;
    chosen.norm(args, begin, end, reinterpret_cast<float*>(workspace.get(norm_scratch(key_dim) * sizeof(float))));
    for (int64_t t = begin; t < end; ++t) {
      const float* own = gate + t * gate_stride;
      for (int64_t h = 0; h < heads; ++h) rate[t * heads + h] = 1.0f / (1.0f + std::exp(-own[h]));
      chosen.decay({own + heads, bias, speed, decay + t * of_token, of_token});
    }
  });
  const int64_t columns = chosen.columns(), blocks = (value_dim + columns - 1) / columns;
  const int64_t threads = 1 + tokens * heads * key_dim * value_dim / kNumbersPerThread;
  dynamic_for(sequences * heads * blocks, threads, [&](int64_t task) {
    thread_local Workspace workspace;
    const FlushSubnormals flushed;
    float* scratch = reinterpret_cast<float*>(workspace.get(delta_scratch(key_dim, columns) * sizeof(float)));
    chosen.recur(args, task / (heads * blocks), task / blocks % heads, task % blocks * columns, scratch);
  });
  return out;
}

}  // namespace kvforge
