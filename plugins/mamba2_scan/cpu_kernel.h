// What the operator hands to the kernel; the kernel is compiled once per instruction set.
#pragma once

#include <cstdint>

namespace kvforge {

constexpr int64_t kScanColumns = 32;  // of a state that a task has: 128 rows of them stay in the first cache

struct Mamba2Scan {
  const void* xbc;  // [T, heads * head_dim + 2 * groups * state_dim], in elements; without queries less C
  int64_t token_stride;
  bool is_bf16, has_queries;
  const float* step;  // [T, heads], how much of a token a head takes up
  const float* decay;  // [T, heads], what a token multiplies the state by
  const float* skip;  // [heads]
  const int32_t* query_start;
  const int32_t* state_read;  // checked against the pool
  const int32_t* state_write;
  float* pool;  // [rows, heads, state_dim, head_dim]
  void* out;  // [T, heads, head_dim], contiguous; without queries it is not written
  int64_t groups, heads, state_dim, head_dim;
};

// Floats of scratch that a task needs.
constexpr int64_t scan_scratch(int64_t state_dim) { return state_dim * (kScanColumns + 2) + 2 * kScanColumns; }

// Columns [first, first + kScanColumns), as far as there are, of a head's state, through all tokens of a sequence.
namespace isa_portable { void scan(const Mamba2Scan& args, int64_t sequence, int64_t head, int64_t first, float* scratch); }
#if defined(__x86_64__)
namespace isa_avx2 { void scan(const Mamba2Scan& args, int64_t sequence, int64_t head, int64_t first, float* scratch); }
namespace isa_avx512 { void scan(const Mamba2Scan& args, int64_t sequence, int64_t head, int64_t first, float* scratch); }
#endif

}  // namespace kvforge
