// Verification of one sequence. Compiled once per instruction set into namespace KVFORGE_ISA, so no inline
// function with external linkage may be used here: the linker would keep one variant of it.
#include "speculative_verify/cpu_kernel.h"

#include "native/simd.h"

namespace kvforge {
namespace {

constexpr int64_t kBlock = 1024;  // tokens whose weights are held at once; sums of blocks are added in double

// The lowest index of the largest element; as in torch, a NaN is larger than any number.
int64_t argmax(const float* x, int64_t count) {
  float best = x[0];
  int64_t index = 0;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = begin + kBlock < count ? begin + kBlock : count;
    bool better = false;
    for (int64_t i = begin; i < end; ++i) better |= !(x[i] <= best);
    if (!better) continue;
    for (int64_t i = begin; i < end; ++i) {
      if (x[i] != x[i]) return i;
      if (x[i] > best) {
        best = x[i];
        index = i;
      }
    }
  }
  return index;
}

// softmax(logits / temperature) of one row.
struct Softmax {
  const float* logits;
  float temperature, top;  // of logits / temperature
  double total;            // sum of exp(logits / temperature - top)

  // exp(logits[i] / temperature - top) for up to kBlock tokens; zeros up to a whole vector. Returns their sum.
  float weights(int64_t begin, int64_t count, float* out) const {
    vfloat sums{};
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      const vfloat w = exp_nonpositive(load(logits + begin + i) / temperature - top);
      store(out + i, w);
      sums += w;
    }
    if (i < count) {
      float rest[kLanes];
      for (int j = 0; j < kLanes; ++j) rest[j] = i + j < count ? logits[begin + i + j] : -__builtin_inff();
      const vfloat w = exp_nonpositive(load(rest) / temperature - top);
      store(out + i, w);
      sums += w;
    }
    return sum(sums);
  }

  // Down to the smallest subnormal: a draft whose p and q are both tiny is accepted by their ratio.
  float probability(int64_t token) const {
    return static_cast<float>(__builtin_exp(static_cast<double>(logits[token] / temperature - top)) / total);
  }
};

int64_t block_size(int64_t begin, int64_t count) { return begin + kBlock < count ? kBlock : count - begin; }

Softmax softmax(const float* logits, int64_t vocab, float temperature, float* buffer) {
  Softmax p{logits, temperature, logits[argmax(logits, vocab)] / temperature, 0};
  for (int64_t begin = 0; begin < vocab; begin += kBlock) p.total += p.weights(begin, block_size(begin, vocab), buffer);
  return p;
}

// What to draw from: p, or max(p - q, 0) where q is a row of probabilities, or one-hot at `draft`.
struct Weights {
  const Softmax& p;
  bool residual;
  const float* q;
  int64_t draft;

  float block(int64_t begin, int64_t count, float* out) const {
    const float whole = p.weights(begin, count, out);
    if (!residual) return whole;
    if (q == nullptr) {
      if (draft < begin || draft >= begin + count) return whole;
      out[draft - begin] = 0;  // p - 1 is not positive
    } else {
      const float inverse = static_cast<float>(1 / p.total);
      for (int64_t i = 0; i < count; ++i) {
        const float difference = out[i] * inverse - q[begin + i];
        out[i] = difference < 0 ? 0.0f : difference;
      }
    }
    vfloat sums{};
    for (int64_t i = 0; i < count; i += kLanes) sums += load(out + i);
    return sum(sums);
  }
};

// Draws the lowest token whose cumulative weight exceeds uniform times the sum; -1 when all weights are 0.
int64_t draw(const Weights& weights, int64_t vocab, float uniform, float* buffer) {
  double total = 0;
  for (int64_t begin = 0; begin < vocab; begin += kBlock) total += weights.block(begin, block_size(begin, vocab), buffer);
  if (total == 0) return -1;
  if (!(total > 0)) return 0;  // NaN in the logits
  const double target = uniform * total;
  double before = 0;
  int64_t last = 0;  // of positive weight
  for (int64_t begin = 0; begin < vocab; begin += kBlock) {
    const int64_t count = block_size(begin, vocab);
    const double after = before + weights.block(begin, count, buffer);
    double cumulative = before;
    for (int64_t i = 0; after > target && i < count; ++i) {
      if (!(buffer[i] > 0)) continue;
      last = begin + i;
      cumulative += buffer[i];
      if (cumulative > target) return last;
    }
    if (after > target) return last;  // the block's sum and the running one differ in rounding
    before = after;
  }
  return last;
}

}  // namespace

namespace KVFORGE_ISA {

void verify_sequence(const DraftVerify& a, int64_t s) {
  const int64_t begin = a.draft_start[s], count = a.draft_start[s + 1] - begin;
  const float temperature = a.temperature[s];
  const auto logits = [&](int64_t j) { return a.logits + (begin + s + j) * a.logits_stride; };
  int64_t j = 0, token = -1;
  if (temperature == 0) {
    token = argmax(logits(0), a.vocab);
    while (j < count && a.draft_ids[begin + j] == token) token = argmax(logits(++j), a.vocab);
  } else {
    alignas(64) float buffer[kBlock];
    for (; token < 0; ++j) {
      const Softmax p = softmax(logits(j), a.vocab, temperature, buffer);
      const float* uniform = a.uniform + 2 * (begin + s + j);
      const int64_t draft = j < count ? a.draft_ids[begin + j] : -1;
      const float* q = j < count && a.draft_probs != nullptr ? a.draft_probs + (begin + j) * a.probs_stride : nullptr;
      if (j < count && uniform[0] * (q == nullptr ? 1.0f : q[draft]) < p.probability(draft)) continue;
      token = draw({p, j < count, q, draft}, a.vocab, uniform[1], buffer);
      if (token < 0) token = draw({p, false, nullptr, -1}, a.vocab, uniform[1], buffer);
      break;
    }
  }
  a.accepted[s] = static_cast<int32_t>(j);
  a.next_token[s] = static_cast<int32_t>(token);
}

}  // namespace KVFORGE_ISA
}  // namespace kvforge
