// What the operator hands to the kernel that writes rows; the kernel is compiled once per instruction set.
#pragma once

#include <cstdint>

#include "native/dtype.h"

namespace kvforge {

struct LatentWrite {
  const void* rows;  // [T, width], in elements
  int64_t token_stride;
  bool source_bf16;
  const float* cos;  // [T, rope_dim / 2], contiguous
  const float* sin;
  const int32_t* slot_mapping;  // [T], checked against the pool
  void* pool;  // [pages, page_size, 1, width], strides in elements
  int64_t page_stride, slot_stride;
  float* scales;  // [pages, page_size, 1], or null
  int64_t scales_page_stride, scales_slot_stride;
  Dtype pool_dtype;
  int64_t page_size, width, rope_dim;
};

// Writes tokens [begin, end); scratch holds `width` floats.
namespace isa_portable { void write_rows(const LatentWrite& args, int64_t begin, int64_t end, float* scratch); }
#if defined(__x86_64__)
namespace isa_avx2 { void write_rows(const LatentWrite& args, int64_t begin, int64_t end, float* scratch); }
namespace isa_avx512 { void write_rows(const LatentWrite& args, int64_t begin, int64_t end, float* scratch); }
#endif

}  // namespace kvforge
