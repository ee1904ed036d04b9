// kvforge::speculative_verify on CPU: checks, then the kernel over sequences.
#include <ATen/core/Tensor.h>

#include <cmath>
#include <tuple>

#include "native/checks.h"
#include "native/dynamic_for.h"
#include "native/isa.h"
#include "speculative_verify/cpu_kernel.h"

namespace kvforge {
namespace {

constexpr const char* kOp = "speculative_verify";
constexpr int64_t kLogitsPerThread = 1 << 15;  // that pay for waking a thread

auto kernel() -> decltype(&isa_portable::verify_sequence) {
#if defined(__x86_64__)
  switch (current_isa()) {
    case Isa::avx512_bf16:
    case Isa::avx512_vnni:
    case Isa::avx512: return &isa_avx512::verify_sequence;
    case Isa::avx2: return &isa_avx2::verify_sequence;
    case Isa::portable: break;
  }
#endif
  return &isa_portable::verify_sequence;
}

at::Tensor rows(const char* name, const at::Tensor& t, int64_t count, int64_t vocab) {
  check_tensor(kOp, name, t, at::kFloat, {count, vocab});
  return t.stride(1) == 1 ? t : t.contiguous();
}

void check_values(const DraftVerify& args, int64_t sequences, int64_t drafts) {
  for (int64_t d = 0; d < drafts; ++d)
    TORCH_CHECK(
        args.draft_ids[d] >= 0 && args.draft_ids[d] < args.vocab, kOp, ": draft_ids holds token ", args.draft_ids[d],
        " but logits have ", args.vocab);
  for (int64_t s = 0; s < sequences; ++s)
    TORCH_CHECK(
        std::isfinite(args.temperature[s]) && args.temperature[s] >= 0, kOp,
        ": temperature must be 0 or positive, not ", args.temperature[s]);
  for (int64_t i = 0; i < 2 * (drafts + sequences); ++i)
    TORCH_CHECK(
        args.uniform[i] >= 0 && args.uniform[i] < 1, kOp, ": uniform must be in [0, 1), not ", args.uniform[i]);
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> speculative_verify(
    const at::Tensor& logits_in, const at::Tensor& draft_ids_in, const at::Tensor& draft_start_in,
    const at::Tensor& draft_probs_in, const at::Tensor& temperature_in, const at::Tensor& uniform_in) {
  check_dims(kOp, "logits", logits_in, 2);
  const int64_t vocab = logits_in.size(1);
  TORCH_CHECK(vocab > 0, kOp, ": logits must have at least one token");
  const at::Tensor draft_ids = int32_tensor(kOp, "draft_ids", draft_ids_in, {-1});
  const int64_t drafts = draft_ids.size(0);
  const at::Tensor draft_start = starts_tensor(kOp, "draft_start", draft_start_in, drafts);
  const int64_t sequences = draft_start.size(0) - 1;
  const at::Tensor logits = rows("logits", logits_in, drafts + sequences, vocab);
  check_dims(kOp, "draft_probs", draft_probs_in, 2);
  const bool one_hot = draft_probs_in.size(0) == 0;
  const at::Tensor draft_probs = rows("draft_probs", draft_probs_in, one_hot ? 0 : drafts, vocab);
  const at::Tensor temperature = float32_tensor(kOp, "temperature", temperature_in, {sequences});
  const at::Tensor uniform = float32_tensor(kOp, "uniform", uniform_in, {drafts + sequences, 2});
  at::Tensor accepted = draft_start.new_empty({sequences}), next_token = draft_start.new_empty({sequences});
  const DraftVerify args{
      .logits = logits.const_data_ptr<float>(),
      .logits_stride = logits.stride(0),
      .draft_ids = draft_ids.const_data_ptr<int32_t>(),
      .draft_start = draft_start.const_data_ptr<int32_t>(),
      .draft_probs = one_hot ? nullptr : draft_probs.const_data_ptr<float>(),
      .probs_stride = draft_probs.stride(0),
      .temperature = temperature.const_data_ptr<float>(),
      .uniform = uniform.const_data_ptr<float>(),
      .accepted = accepted.mutable_data_ptr<int32_t>(),
      .next_token = next_token.mutable_data_ptr<int32_t>(),
      .vocab = vocab,
  };
  check_values(args, sequences, drafts);
  const auto verify_sequence = kernel();
  dynamic_for(sequences, 1 + logits.numel() / kLogitsPerThread, [&](int64_t s) { verify_sequence(args, s); });
  return {accepted, next_token};
}

}  // namespace kvforge
