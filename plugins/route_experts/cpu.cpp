// kvforge::route_experts on CPU. A token's sums run over the experts in their order, whatever the other tokens are.
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <tuple>

#include "native/checks.h"
#include "native/dynamic_for.h"
#include "native/empty.h"

namespace kvforge {
namespace {

constexpr const char* kOp = "route_experts";
constexpr int64_t kTokensAtOnce = 16;
constexpr int64_t kLogitsPerThread = 1 << 12;  // that pay for waking a thread

bool before(float a, float b) { return a > b || (std::isnan(a) && !std::isnan(b)); }

void route(const float* logits, int64_t experts, int64_t count, bool normalize, int32_t* ids, float* weights) {
  int64_t found = 0;
  for (int64_t e = 0; e < experts; ++e) {  // insertion behind all that are as great
    const float logit = logits[e];
    if (found == count && !before(logit, weights[count - 1])) continue;
    int64_t place = found < count ? found++ : count - 1;
    for (; place > 0 && before(logit, weights[place - 1]); --place) {
      weights[place] = weights[place - 1];
      ids[place] = ids[place - 1];
    }
    weights[place] = logit;
    ids[place] = static_cast<int32_t>(e);
  }
  const float top = weights[0];
  float sum = 0.0f;
  for (int64_t j = 0; j < count; ++j) weights[j] = std::exp(weights[j] - top);
  if (normalize) {
    for (int64_t j = 0; j < count; ++j) sum += weights[j];
  } else {
    for (int64_t e = 0; e < experts; ++e) sum += std::exp(logits[e] - top);
  }
  for (int64_t j = 0; j < count; ++j) weights[j] /= sum;
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> route_experts(const at::Tensor& logits_in, int64_t num_active, bool normalize) {
  check_tensor(kOp, "logits", logits_in, at::kFloat, {-1, -1});
  const int64_t tokens = logits_in.size(0), experts = logits_in.size(1);
  TORCH_CHECK(num_active >= 1 && num_active <= experts, kOp, ": num_active must be from 1 to the ", experts,
              " experts of logits, not ", num_active);
  const at::Tensor logits = logits_in.contiguous();
  at::Tensor ids = empty_tensor({tokens, num_active}, at::kInt);
  at::Tensor weights = empty_tensor({tokens, num_active}, logits.scalar_type());
  const float* from = logits.const_data_ptr<float>();
  int32_t* id = ids.mutable_data_ptr<int32_t>();
  float* weight = weights.mutable_data_ptr<float>();
  const int64_t pieces = (tokens + kTokensAtOnce - 1) / kTokensAtOnce;
  dynamic_for(pieces, 1 + tokens * experts / kLogitsPerThread, [&](int64_t piece) {
    const int64_t end = std::min((piece + 1) * kTokensAtOnce, tokens);
    for (int64_t t = piece * kTokensAtOnce; t < end; ++t)
      route(from + t * experts, experts, num_active, normalize, id + t * num_active, weight + t * num_active);
  });
  return {ids, weights};
}

}  // namespace kvforge
