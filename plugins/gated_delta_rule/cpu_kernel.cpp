// The recurrence of a block of a state's columns, which do not depend on each other. Compiled once per instruction set
// into namespace KVFORGE_ISA, so no inline function with external linkage may be used here: the linker would keep one
// variant of it.
//
// A token reads the state before it, S'k and S'q, and its result follows from these: with the decays G, a diagonal, d =
// rate * (v - S'Gk), the state after it is G S + k d', and that times q is S'Gq + (k'q) d. So the pass that reads for a
// token brings the state up to date for the one before it, and each number is loaded and stored once for each token.
// A head's one decay is taken out of both sums, those by channel are in k and q as they are read with.
#include "gated_delta_rule/cpu_kernel.h"

#include <cmath>
#include <cstring>
#include <type_traits>

#include "native/multiply_add.h"
#include "native/rows.h"
#include "native/softplus.h"

namespace kvforge {
namespace {

constexpr int64_t kVectors = 4;  // what they sum, and what they add, takes 20 registers
constexpr int64_t kColumns = kVectors * kLanes;  // 128 keys of them stay in the first cache

// A token's part in the state: S becomes decay * S + key * change'; by channel each row has its decay.
struct Update {
  const float* key;
  const float* change;  // [kColumns]
  const float* decay;
};

// Brings a state [key_dim, kColumns] up to date and gives its products with k and q, where it is read for these.
template <bool by_channel, bool updates, bool knows, bool finds>
void pass(float* state, int64_t key_dim, Update last, const float* k, const float* q, vfloat* known, vfloat* found) {
  vfloat sums[2][kVectors] = {}, results[2][kVectors] = {}, change[kVectors];
  if constexpr (updates)
    for (int64_t c = 0; c < kVectors; ++c) change[c] = load(last.change + c * kLanes);
  const float all = updates ? *last.decay : 1.0f;
  const auto step = [&](int64_t i, int parity) {
    for (int64_t c = 0; c < kVectors; ++c) {
      float* place = state + i * kColumns + c * kLanes;
      vfloat s = load(place);
      if constexpr (updates) {
        s = multiply_add(broadcast(last.key[i]), change[c], s * (by_channel ? last.decay[i] : all));
        store(place, s);
      }
      if constexpr (knows) sums[parity][c] = multiply_add(broadcast(k[i]), s, sums[parity][c]);
      if constexpr (finds) results[parity][c] = multiply_add(broadcast(q[i]), s, results[parity][c]);
    }
  };
  int64_t i = 0;
  for (; i + 2 <= key_dim; i += 2) {
    step(i, 0);
    step(i + 1, 1);
  }
  if (i < key_dim) step(i, 0);
  for (int64_t c = 0; c < kVectors; ++c) {
    if constexpr (knows) known[c] = sums[0][c] + sums[1][c];
    if constexpr (finds) found[c] = results[0][c] + results[1][c];
  }
}

// The product of two keys, with zeros behind them.
float product_of(const float* a, const float* b, int64_t key_dim) {
  vfloat total{};
  for (int64_t i = 0; i < key_dim; i += kLanes) total = multiply_add(load(a + i), load(b + i), total);
  return sum(total);
}

// x / sqrt(sum x^2 + 1e-6) * scale, with zeros behind it as before.
template <typename Element>
void normed(const Element* x, int64_t count, float scale, float* out) {
  widen(x, out, count);
  const float factor = scale / std::sqrt(product_of(out, out, count) + 1e-6f);
  for (int64_t i = 0; i < count; ++i) out[i] *= factor;
}

// The products of two rows of numbers.
void multiply(const float* __restrict__ a, const float* __restrict__ b, int64_t count, float* __restrict__ out) {
  for (int64_t i = 0; i < count; ++i) out[i] = a[i] * b[i];
}

template <typename Element, bool finds, bool by_channel>
void run(const DeltaRule& a, int64_t sequence, int64_t head, int64_t first, float* scratch) {
  const int64_t dk = a.key_dim, dv = a.value_dim, count = dv - first < kColumns ? dv - first : kColumns;
  const int64_t key_head = head / (a.value_heads / a.key_heads), keys = a.key_heads * dk, queries = finds ? keys : 0;
  const int64_t begin = a.query_start[sequence], end = a.query_start[sequence + 1];
  const int64_t size = padded_key(dk);
  float *q = scratch, *k[2] = {q + size, q + 2 * size};  // the token's and the last one's, in turns
  float *decayed_q = q + 3 * size, *decayed_k = q + 4 * size;
  float *state = q + 5 * size, *change = state + dk * kColumns, *result = change + kColumns;
  for (int64_t i = 0; i < delta_scratch(dk, kColumns); ++i) scratch[i] = 0.0f;
  const auto row = [&](int64_t index) { return a.pool + (index * a.value_heads + head) * dk * dv + first; };
  if (begin < end && a.state_read[sequence] >= 0)
    copy_rows(row(a.state_read[sequence]), dv, state, kColumns, dk, count);
  Update last{};
  vfloat known[kVectors], found[kVectors];
  for (int64_t t = begin; t < end; ++t) {
    const Element* token = static_cast<const Element*>(a.qkv) + t * a.token_stride;
    float* key = k[(t - begin) & 1];
    const float* decay = a.decay + (t * a.value_heads + head) * (by_channel ? dk : 1);
    if constexpr (finds) normed(token + key_head * dk, dk, 1.0f / std::sqrt(static_cast<float>(dk)), q);
    normed(token + queries + key_head * dk, dk, 1.0f, key);
    if constexpr (by_channel) multiply(decay, key, dk, decayed_k);
    if constexpr (by_channel && finds) multiply(decay, q, dk, decayed_q);
    const float *read_k = by_channel ? decayed_k : key, *read_q = by_channel ? decayed_q : q;
    if (t == begin)
      pass<by_channel, false, true, finds>(state, dk, last, read_k, read_q, known, found);
    else
      pass<by_channel, true, true, finds>(state, dk, last, read_k, read_q, known, found);
    if (t > begin && a.state_write[t - 1] >= 0)
      copy_rows(state, kColumns, row(a.state_write[t - 1]), dv, dk, count);
    const float rate = a.rate[t * a.value_heads + head], all = by_channel ? 1.0f : *decay;
    const Element* v = token + queries + keys + head * dv + first;
    widen(v, change, count);
    for (int64_t c = 0; c < kVectors; ++c) {
      const vfloat d = rate * (load(change + c * kLanes) - all * known[c]);
      store(change + c * kLanes, d);
    }
    last = {key, change, decay};
    if constexpr (finds) {
      const float product = product_of(key, q, dk);
      for (int64_t c = 0; c < kVectors; ++c)
        store(result + c * kLanes, all * found[c] + product * load(change + c * kLanes));
      narrow(result, static_cast<Element*>(a.out) + (t * a.value_heads + head) * dv + first, count);
    }
  }
  if (begin < end && a.state_write[end - 1] >= 0) {
    pass<by_channel, true, false, false>(state, dk, last, nullptr, nullptr, nullptr, nullptr);
    copy_rows(state, kColumns, row(a.state_write[end - 1]), dv, dk, count);
  }
}

}  // namespace

namespace KVFORGE_ISA {

int64_t columns() { return kColumns; }

void recur(const DeltaRule& args, int64_t sequence, int64_t head, int64_t first, float* scratch) {
  const auto run_as = [&](auto element) {
    using Element = decltype(element);
    const auto run_by = [&](auto by_channel) {
      args.has_queries ? run<Element, true, by_channel.value>(args, sequence, head, first, scratch)
                       : run<Element, false, by_channel.value>(args, sequence, head, first, scratch);
    };
    args.by_channel ? run_by(std::true_type()) : run_by(std::false_type());
  };
  args.is_bf16 ? run_as(bf16()) : run_as(float());
}

void decay(const Decays& args) {
  const auto vector = [](vfloat step, vfloat bias, vfloat speed) {
    return exp_nonpositive(-speed * softplus_of(step + bias));
  };
  int64_t i = 0;
  for (; i + kLanes <= args.count; i += kLanes)
    store(args.out + i, vector(load(args.step + i), load(args.bias + i), load(args.speed + i)));
  float last[4][kLanes] = {};
  const int64_t rest = (args.count - i) * sizeof(float);
  std::memcpy(last[0], args.step + i, rest);
  std::memcpy(last[1], args.bias + i, rest);
  std::memcpy(last[2], args.speed + i, rest);
  store(last[3], vector(load(last[0]), load(last[1]), load(last[2])));
  std::memcpy(args.out + i, last[3], rest);
}

}  // namespace KVFORGE_ISA
}  // namespace kvforge
