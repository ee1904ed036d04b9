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

constexpr int64_t kVectors = 4;  // what they sum, and what they add, takes 12 registers
constexpr int64_t kColumns = kVectors * kLanes;  // 128 keys of them stay in the first cache

// A token's part in the state: S becomes decay * S + key * change'; by channel each row has its decay.
struct Update {
  const float* key;
  const float* change;  // [kColumns]
  const float* decay;
};

// Rows of a block of columns, `stride` apart.
struct Rows {
  float* first;
  int64_t stride;
};

// Takes a state [key_dim, kColumns] from one place to another, up to date, and gives its products with k and q, where it
// is read for these; where it is not updated, it stays in its place.
template <bool by_channel, bool updates, bool knows, bool finds>
[[gnu::always_inline]] inline void pass(
    Rows from, Rows to, int64_t key_dim, Update last, const float* k, const float* q, vfloat* known, vfloat* found) {
  vfloat sums[kVectors] = {}, results[kVectors] = {}, change[kVectors];
  if constexpr (updates)
    for (int64_t c = 0; c < kVectors; ++c) change[c] = load(last.change + c * kLanes);
  const vfloat one_decay = broadcast(updates ? *last.decay : 1.0f);
  for (int64_t i = 0; i < key_dim; ++i, from.first += from.stride, to.first += to.stride) {
    // Read before the state is written: for all that the compiler knows they are part of it.
    const vfloat decay = by_channel && updates ? broadcast(last.decay[i]) : one_decay;
    const vfloat key = broadcast(updates ? last.key[i] : 0.0f);
    const vfloat of_k = broadcast(knows ? k[i] : 0.0f), of_q = broadcast(finds ? q[i] : 0.0f);
    for (int64_t c = 0; c < kVectors; ++c) {
      vfloat s = load(from.first + c * kLanes);
      if constexpr (updates) {
        s = multiply_add(key, change[c], s * decay);
        store(to.first + c * kLanes, s);
      }
      if constexpr (knows) sums[c] = multiply_add(of_k, s, sums[c]);
      if constexpr (finds) results[c] = multiply_add(of_q, s, results[c]);
    }
  }
  for (int64_t c = 0; c < kVectors; ++c) {
    if constexpr (knows) known[c] = sums[c];
    if constexpr (finds) found[c] = results[c];
  }
}

// The product of two keys, with zeros behind them.
float product_of(const float* a, const float* b, int64_t key_dim) {
  vfloat total{};
  for (int64_t i = 0; i < key_dim; i += kLanes) total = multiply_add(load(a + i), load(b + i), total);
  return sum(total);
}

// The numbers of x times a factor.
template <typename Element>
void scaled(const Element* __restrict__ x, int64_t count, float factor, float* __restrict__ out) {
  for (int64_t i = 0; i < count; ++i) out[i] = to_float(x[i]) * factor;
}

// Makes `out` x / sqrt(sum x^2 + 1e-6) * scale, with zeros behind it as before, and returns what x was multiplied by.
template <typename Element>
float normed(const Element* x, int64_t count, float scale, float* out) {
  widen(x, out, count);
  const float factor = scale / std::sqrt(product_of(out, out, count) + 1e-6f);
  scaled(x, count, factor, out);
  return factor;
}

template <typename Element, bool finds>
void norm_as(const DeltaRule& a, int64_t begin, int64_t end, float* scratch) {
  const int64_t dk = a.key_dim, queries = finds ? a.key_heads * dk : 0;
  float *key = scratch, *q = key + padded_key(dk), *to = a.norms + 3 * begin * a.key_heads;
  for (int64_t i = 0; i < norm_scratch(dk); ++i) scratch[i] = 0.0f;
  for (int64_t t = begin; t < end; ++t)
    for (int64_t head = 0; head < a.key_heads; ++head, to += 3) {
      const Element* own = static_cast<const Element*>(a.qkv) + t * a.token_stride + head * dk;
      to[0] = normed(own + queries, dk, 1.0f, key);
      if constexpr (finds) {
        to[1] = normed(own, dk, 1.0f / std::sqrt(static_cast<float>(dk)), q);
        to[2] = product_of(key, q, dk);
      }
    }
}

// Asks for numbers that are read later. Tokens are too far apart for the CPU to guess them.
template <typename Number>
void prefetch(const Number* numbers, int64_t count) {
  for (int64_t i = 0; i < count; i += 64 / sizeof(Number)) __builtin_prefetch(numbers + i);
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
  if (begin == end) return;
  float *q = scratch, *k[2] = {q + dk, q + 2 * dk};  // the token's and the last one's, in turns
  float *decayed_q = q + 3 * dk, *decayed_k = q + 4 * dk;
  float *kept = q + 5 * padded_key(dk), *change = kept + dk * kColumns, *result = change + kColumns;
  const auto row = [&](int64_t index) { return a.pool + (index * a.value_heads + head) * dk * dv + first; };
  const int64_t read = a.state_read[sequence];
  const bool is_whole = count == kColumns;  // whole vectors go from and to the pool as they are
  if (!is_whole || read < 0)
    for (int64_t i = 0; i < (dk + 1) * kColumns; ++i) kept[i] = 0.0f;  // and `change`
  if (!is_whole && read >= 0) copy_rows(row(read), dv, kept, kColumns, dk, count);
  Rows state = is_whole && read >= 0 ? Rows{row(read), dv} : Rows{kept, kColumns};
  Update last{};
  vfloat known[kVectors], found[kVectors];
  const auto after = [&](int64_t t) {
    return is_whole && a.state_write[t] >= 0 ? Rows{row(a.state_write[t]), dv} : Rows{kept, kColumns};
  };
  const auto write_parts = [&](int64_t t) {
    if (!is_whole && a.state_write[t] >= 0) copy_rows(kept, kColumns, row(a.state_write[t]), dv, dk, count);
  };
  for (int64_t t = begin; t < end; ++t) {
    const Element* token = static_cast<const Element*>(a.qkv) + t * a.token_stride;
    const float* norms = a.norms + 3 * (t * a.key_heads + key_head);
    float* key = k[(t - begin) & 1];
    if (t + 1 < end) {
      const Element* next = token + a.token_stride;
      prefetch(next + queries + key_head * dk, dk);
      if constexpr (finds) prefetch(next + key_head * dk, dk);
      prefetch(next + queries + keys + head * dv + first, count);
      if constexpr (by_channel) prefetch(a.decay + ((t + 1) * a.value_heads + head) * dk, dk);
    }
    const float* decay = a.decay + (t * a.value_heads + head) * (by_channel ? dk : 1);
    scaled(token + queries + key_head * dk, dk, norms[0], key);
    if constexpr (finds) scaled(token + key_head * dk, dk, norms[1], q);
    if constexpr (by_channel) multiply(decay, key, dk, decayed_k);
    if constexpr (by_channel && finds) multiply(decay, q, dk, decayed_q);
    const float *read_k = by_channel ? decayed_k : key, *read_q = by_channel ? decayed_q : q;
    if (t == begin) {
      pass<by_channel, false, true, finds>(state, state, dk, last, read_k, read_q, known, found);
    } else {
      const Rows next = after(t - 1);
      pass<by_channel, true, true, finds>(state, next, dk, last, read_k, read_q, known, found);
      state = next;
      write_parts(t - 1);
    }
    const float rate = a.rate[t * a.value_heads + head], all = by_channel ? 1.0f : *decay;
    const Element* v = token + queries + keys + head * dv + first;
    widen(v, change, count);
    for (int64_t c = 0; c < kVectors; ++c) {
      const vfloat d = rate * (load(change + c * kLanes) - all * known[c]);
      store(change + c * kLanes, d);
    }
    last = {key, change, decay};
    if constexpr (finds) {
      for (int64_t c = 0; c < kVectors; ++c)
        store(result + c * kLanes, all * found[c] + norms[2] * load(change + c * kLanes));
      narrow(result, static_cast<Element*>(a.out) + (t * a.value_heads + head) * dv + first, count);
    }
  }
  if (a.state_write[end - 1] >= 0) {
    pass<by_channel, true, false, false>(state, after(end - 1), dk, last, nullptr, nullptr, nullptr, nullptr);
    write_parts(end - 1);
  }
}

}  // namespace

namespace KVFORGE_ISA {

int64_t columns() { return kColumns; }

void norm(const DeltaRule& args, int64_t begin, int64_t end, float* scratch) {
  if (args.has_queries)
    args.is_bf16 ? norm_as<bf16, true>(args, begin, end, scratch) : norm_as<float, true>(args, begin, end, scratch);
  else
    args.is_bf16 ? norm_as<bf16, false>(args, begin, end, scratch) : norm_as<float, false>(args, begin, end, scratch);
}

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
