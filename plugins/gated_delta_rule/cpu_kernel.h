// What the operator hands to the kernel; the kernel is compiled once per instruction set.
#pragma once

#include <cstdint>

namespace kvforge {

struct DeltaRule {
  const void* qkv;  // [T, 2 (without queries 1) * key_heads * key_dim + value_heads * value_dim], in elements
  int64_t token_stride;
  bool is_bf16, has_queries, by_channel;
  const float* decay;  // [T, value_heads] or [T, value_heads, key_dim], what a token multiplies the state by
  const float* rate;  // [T, value_heads], how much of what is new it takes up
  const int32_t* query_start;
  const int32_t* state_read;  // checked against the pool
  const int32_t* state_write;
  float* pool;  // [rows, value_heads, key_dim, value_dim]
  void* out;  // [T, value_heads, value_dim], contiguous; nothing without queries
  int64_t key_heads, value_heads, key_dim, value_dim;
  float* norms;  // [T, key_heads, 3], which `norm` fills: factors that norm k and q, and the product of both
};

// Floats of a key with zeros behind it, whole vectors of any width.
constexpr int64_t padded_key(int64_t key_dim) { return (key_dim + 15) / 16 * 16; }

// Floats of scratch that a task of so many columns needs.
constexpr int64_t delta_scratch(int64_t key_dim, int64_t columns) {
  return key_dim * columns + 5 * padded_key(key_dim) + 2 * columns;
}

// Floats of scratch that `norm` needs.
constexpr int64_t norm_scratch(int64_t key_dim) { return 2 * padded_key(key_dim); }

// What makes decays: exp(-speed * softplus(step + bias)) of `count` numbers.
struct Decays {
  const float *step, *bias, *speed;
  float* out;
  int64_t count;
};

// columns: how many of a state's a task has.
// norm: what the heads and tasks of tokens [begin, end) have in common.
// recur: those from `first` on, as far as there are, of a value head's state, through all tokens of a sequence.
#define KVFORGE_DELTA_RULE \
  int64_t columns(); \
  void norm(const DeltaRule& args, int64_t begin, int64_t end, float* scratch); \
  void recur(const DeltaRule& args, int64_t sequence, int64_t head, int64_t first, float* scratch); \
  void decay(const Decays& args);
namespace isa_portable { KVFORGE_DELTA_RULE }
#if defined(__x86_64__)
namespace isa_avx2 { KVFORGE_DELTA_RULE }
namespace isa_avx512 { KVFORGE_DELTA_RULE }
#endif
#undef KVFORGE_DELTA_RULE

}  // namespace kvforge
