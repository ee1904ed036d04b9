// The rotation of queries for pools with rotated keys; compiled once per instruction set.
#pragma once

#include <cstdint>

namespace kvforge {

struct QueryRotation {  // [T, heads, head_dim], strides in elements; out is contiguous
  const void* q;
  void* out;
  bool bf16;
  int64_t token_stride, head_stride, heads, head_dim;
};

// Tokens [begin, end), each head as one of a pool of int4; scratch holds head_dim floats.
namespace isa_portable { void rotate_queries(const QueryRotation& args, int64_t begin, int64_t end, float* scratch); }
#if defined(__x86_64__)
namespace isa_avx2 { void rotate_queries(const QueryRotation& args, int64_t begin, int64_t end, float* scratch); }
namespace isa_avx512 { void rotate_queries(const QueryRotation& args, int64_t begin, int64_t end, float* scratch); }
#endif

}  // namespace kvforge
