// What the operator hands to the kernel; the kernel is compiled once per instruction set.
#pragma once

#include <cstdint>

namespace kvforge {

struct Mamba2Scan {
  int64_t tokens;
  const void* xbc;  // [T, heads * head_dim + 2 * groups * state_dim], in elements; without queries less C
  int64_t token_stride;
  bool is_bf16, has_queries;
  const float* raw;  // [T, heads], steps before their bias and softplus
  const float* bias;  // [heads], of the steps
  const float* speed;  // [heads], of forgetting
  float* factors;  // scan_factors() of B and C; with the next two, what `prepare` makes for `scan`
  float* step;  // [T, heads], how much of a token a head takes up
  float* decay;  // [T, heads], what a token multiplies the state by
  const float* skip;  // [heads]
  const int32_t* query_start;
  const int32_t* state_read;  // checked against the pool
  const int32_t* state_write;
  float* pool;  // [rows, heads, state_dim, head_dim]
  void* out;  // [T, heads, head_dim], contiguous; without queries it is not written
  int64_t groups, heads, state_dim, head_dim;
};

// Between a load and a store of a state; what they add and find stays in the first cache.
constexpr int64_t kScanTokens = 32;

// Tokens of a block of factors, and blocks of a step.
constexpr int64_t scan_block(int64_t tokens) { return tokens < kScanTokens ? tokens : kScanTokens; }
constexpr int64_t scan_blocks(int64_t tokens) { return (tokens + kScanTokens - 1) / kScanTokens; }

// Numbers of B and C, of B alone without queries, of all tokens.
constexpr int64_t scan_factors(int64_t tokens, int64_t groups, int64_t state_dim, bool has_queries) {
  return groups * scan_blocks(tokens) * scan_block(tokens) * state_dim * (has_queries ? 2 : 1);
}

constexpr int64_t kScanHeads = 8;  // of a task at most, whose states stay in the second cache

// Floats of scratch that a task of so many columns of so many heads needs.
constexpr int64_t scan_scratch(int64_t state_dim, int64_t columns, int64_t heads) {
  return (heads * state_dim + 3 * kScanTokens + 1) * columns + kScanTokens;
}

// scan_columns: how many of a state's a task has.
// prepare: steps, decays, B and C of tokens [begin, end), these in the order in which `scan` reads them.
// scan: the columns from `first` on, as far as there are, of the states of `heads` heads from `head` on, through all
// tokens of a sequence.
#define KVFORGE_MAMBA2_SCAN \
  int64_t scan_columns(); \
  void prepare(const Mamba2Scan& args, int64_t begin, int64_t end); \
  void scan(const Mamba2Scan& args, int64_t sequence, int64_t head, int64_t heads, int64_t first, float* scratch);
namespace isa_portable { KVFORGE_MAMBA2_SCAN }
#if defined(__x86_64__)
namespace isa_avx2 { KVFORGE_MAMBA2_SCAN }
namespace isa_avx512 { KVFORGE_MAMBA2_SCAN }
#endif
#undef KVFORGE_MAMBA2_SCAN

}  // namespace kvforge
