// kvforge::mamba2_scan on CPU: checks, what all heads have of each token, then the kernel over sequences, heads
// and columns.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>

#include "mamba2_scan/cpu_kernel.h"
#include "native/dynamic_for.h"
#include "native/empty.h"
#include "native/isa.h"
#include "native/states.h"
#include "native/subnormals.h"
#include "native/workspace.h"

namespace kvforge {
namespace {

constexpr const char* kOp = "mamba2_scan";
constexpr int64_t kStepsPerTask = 1 << 10;
constexpr int64_t kNumbersPerThread = 1 << 17;  // of states, a token each, that pay for waking a thread
constexpr int64_t kTasksPerThread = 4;

struct Kernel {
  decltype(&isa_portable::scan_columns) columns;
  decltype(&isa_portable::prepare) prepare;
  decltype(&isa_portable::scan) scan;
};

Kernel kernel() {
#if defined(__x86_64__)
  switch (current_isa()) {
    case Isa::avx512_bf16:
    case Isa::avx512_vnni:
    case Isa::avx512: return {&isa_avx512::scan_columns, &isa_avx512::prepare, &isa_avx512::scan};
    case Isa::avx2: return {&isa_avx2::scan_columns, &isa_avx2::prepare, &isa_avx2::scan};
    case Isa::portable: break;
  }
#endif
  return {&isa_portable::scan_columns, &isa_portable::prepare, &isa_portable::scan};
}

}  // namespace

at::Tensor mamba2_scan(
    const at::Tensor& xbc_in, const at::Tensor& steps_in, const at::Tensor& decay_log_in,
    const at::Tensor& step_bias_in, const at::Tensor& skip_in, const at::Tensor& query_start_in,
    const at::Tensor& state_read_in, const at::Tensor& state_write_in, at::Tensor& state_pool, bool has_queries) {
  check_float(kOp, "xbc", xbc_in, 2);
  check_tensor(kOp, "state_pool", state_pool, at::kFloat, {-1, -1, -1, -1});
  TORCH_CHECK(state_pool.is_contiguous(), kOp, ": state_pool must be contiguous");
  const int64_t tokens = xbc_in.size(0), rows = state_pool.size(0), heads = state_pool.size(1);
  const int64_t state_dim = state_pool.size(2), head_dim = state_pool.size(3);
  const int64_t of_groups = xbc_in.size(1) - heads * head_dim;
  const int64_t of_group = (has_queries ? 2 : 1) * state_dim;
  TORCH_CHECK(heads > 0 && state_dim > 0 && of_groups > 0 && of_groups % of_group == 0, kOp, ": xbc must have ",
              heads * head_dim, " columns of x and some of B", has_queries ? " and C" : "", ", not ", xbc_in.size(1));
  const int64_t groups = of_groups / of_group;
  TORCH_CHECK(heads % groups == 0, kOp, ": xbc has ", groups, " groups, which ", heads, " heads are not a multiple of");
  const at::Tensor steps = float32_tensor(kOp, "steps", steps_in, {tokens, heads});
  const at::Tensor decay_log = float32_tensor(kOp, "decay_log", decay_log_in, {heads});
  const at::Tensor step_bias = float32_tensor(kOp, "step_bias", step_bias_in, {heads});
  const at::Tensor skip = float32_tensor(kOp, "skip", skip_in, {heads});
  const at::Tensor query_start = starts_tensor(kOp, "query_start", query_start_in, tokens);
  const int64_t sequences = query_start.size(0) - 1;
  const at::Tensor state_read = rows_tensor(kOp, "state_read", state_read_in, sequences, rows);
  const at::Tensor state_write = rows_tensor(kOp, "state_write", state_write_in, tokens, rows);
  const at::Tensor xbc = xbc_in.stride(1) == 1 ? xbc_in : xbc_in.contiguous();
  at::Tensor out = empty_tensor({has_queries ? tokens : 0, heads, head_dim}, xbc.scalar_type());
  const int64_t packed = scan_factors(tokens, groups, state_dim, has_queries);
  at::Tensor factors = empty_tensor({packed + 2 * tokens * heads + heads}, steps.scalar_type());
  float *step = factors.mutable_data_ptr<float>() + packed, *decay = step + tokens * heads;
  float* speed = decay + tokens * heads;
  const float* log = decay_log.const_data_ptr<float>();
  for (int64_t h = 0; h < heads; ++h) speed[h] = std::exp(log[h]);
  const Mamba2Scan args{
      .tokens = tokens,
      .xbc = xbc.const_data_ptr(),
      .token_stride = xbc.stride(0),
      .is_bf16 = xbc.scalar_type() == at::kBFloat16,
      .has_queries = has_queries,
      .raw = steps.const_data_ptr<float>(),
      .bias = step_bias.const_data_ptr<float>(),
      .speed = speed,
      .factors = factors.mutable_data_ptr<float>(),
      .step = step,
      .decay = decay,
      .skip = skip.const_data_ptr<float>(),
      .query_start = query_start.const_data_ptr<int32_t>(),
      .state_read = state_read.const_data_ptr<int32_t>(),
      .state_write = state_write.const_data_ptr<int32_t>(),
      .pool = state_pool.mutable_data_ptr<float>(),
      .out = out.mutable_data_ptr(),
      .groups = groups,
      .heads = heads,
      .state_dim = state_dim,
      .head_dim = head_dim,
  };
  const Kernel chosen = kernel();
  at::parallel_for(0, tokens, std::max<int64_t>(1, kStepsPerTask / heads),
                   [&](int64_t begin, int64_t end) { chosen.prepare(args, begin, end); });
  const int64_t columns = chosen.columns(), blocks = (head_dim + columns - 1) / columns;
  const int64_t paid = 1 + tokens * heads * state_dim * head_dim / kNumbersPerThread;
  const int64_t threads = std::min<int64_t>(paid, at::get_num_threads());
  const int64_t size = std::clamp(sequences * heads * blocks / (kTasksPerThread * threads), int64_t{1}, kScanHeads);
  const int64_t parts = (heads + size - 1) / size;
  dynamic_for(sequences * parts * blocks, threads, [&](int64_t task) {
    thread_local Workspace workspace;
    const FlushSubnormals flushed;
    const int64_t head = task / blocks % parts * size, own = std::min(size, heads - head);
    float* scratch = reinterpret_cast<float*>(workspace.get(scan_scratch(state_dim, columns, own) * sizeof(float)));
    chosen.scan(args, task / (parts * blocks), head, own, task % blocks * columns, scratch);
  });
  return out;
}

}  // namespace kvforge
