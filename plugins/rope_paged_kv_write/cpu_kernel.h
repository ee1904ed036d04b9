// What the operator hands to the kernel that writes tokens; the kernel is compiled once per instruction set.
#pragma once

#include <cstdint>

namespace kvforge {

struct KvWrite {
  const void* k;  // [T, kv_heads, head_dim], strides in elements
  const void* v;
  bool source_bf16;
  int64_t k_token_stride, k_head_stride, v_token_stride, v_head_stride;
  const float* cos;  // [T, head_dim / 2], contiguous
  const float* sin;
  const int32_t* slot_mapping;  // [T], checked against the pools
  void* k_pool;                 // [pages, page_size, kv_heads, head_dim], strides in elements
  void* v_pool;
  bool pool_bf16;
  int64_t k_page_stride, k_slot_stride, k_pool_head_stride;
  int64_t v_page_stride, v_slot_stride, v_pool_head_stride;
  int64_t page_size, kv_heads, head_dim;
};

// Writes tokens [begin, end).
namespace isa_portable { void write_tokens(const KvWrite& args, int64_t begin, int64_t end); }
#if defined(__x86_64__)
namespace isa_avx2 { void write_tokens(const KvWrite& args, int64_t begin, int64_t end); }
namespace isa_avx512 { void write_tokens(const KvWrite& args, int64_t begin, int64_t end); }
#endif

}  // namespace kvforge
