// What the operator hands to the kernel that writes tokens; the kernel is compiled once per instruction set.
#pragma once

#include <cstdint>

#include "native/dtype.h"

namespace kvforge {

struct KvSource {  // [T, kv_heads, head_dim], strides in elements
  const void* data;
  int64_t token_stride, head_stride;
};

struct KvTarget {
  void* data;  // [pages, page_size, kv_heads, head_dim], strides in elements
  Dtype type;
  int64_t page_stride, slot_stride, head_stride;
  float* scales;  // [pages, page_size, kv_heads], or null
  int64_t scales_page_stride, scales_slot_stride, scales_head_stride;
  float scale;  // of 8-bit elements without `scales`
  bool rotated;  // heads of 8 or 4 bits, before they are rounded
};

struct KvWrite {
  KvSource k, v;
  bool source_bf16;
  const float* cos;  // [T, head_dim / 2], contiguous
  const float* sin;
  const int32_t* slot_mapping;  // [T], checked against the pools
  KvTarget k_pool, v_pool;
  int64_t page_size, kv_heads, head_dim;
};

// Writes tokens [begin, end); scratch holds head_dim floats.
namespace isa_portable { void write_tokens(const KvWrite& args, int64_t begin, int64_t end, float* scratch); }
#if defined(__x86_64__)
namespace isa_avx2 { void write_tokens(const KvWrite& args, int64_t begin, int64_t end, float* scratch); }
namespace isa_avx512 { void write_tokens(const KvWrite& args, int64_t begin, int64_t end, float* scratch); }
#endif

}  // namespace kvforge
