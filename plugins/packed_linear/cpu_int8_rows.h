// The rows of int8 kernels that work row by row: the quantized values plus 128, padded to whole groups, then at the next
// multiple of 64 bytes the row's scale. Element: the unsigned integer that a value is stored as.
// Used by files that are compiled once per instruction set.
#pragma once

#include "packed_linear/cpu_int8.h"

namespace kvforge {
namespace {

template <typename Element>
int64_t scale_offset(const LinearArgs& a) {
  return (a.depth * static_cast<int64_t>(sizeof(Element)) + 63) / 64 * 64;
}

bool takes_x(const LinearArgs&) { return false; }

// An odd number of cache lines, so that the same place of many rows is not in the same set of the cache.
template <typename Element>
int64_t row_bytes(const LinearArgs& a) {
  return (scale_offset<Element>(a) / 64 + 1 | 1) * 64;
}

// quantize(x, depth, out) writes the quantized values plus 128 and returns the scale.
template <typename Element, typename Quantize>
void prepare_rows(const LinearArgs& a, int64_t begin, int64_t end, char* rows, char* scratch,
                  const Quantize& quantize) {
  const int64_t offset = scale_offset<Element>(a);
  bf16* changed = reinterpret_cast<bf16*>(scratch);
  for (int64_t r = begin; r < end; ++r, rows += row_bytes<Element>(a)) {
    Element* out = reinterpret_cast<Element*>(rows);
    const float scale = quantize(row_to_quantize(a, row_of_x(a, r), changed), a.depth, out);
    std::memset(out + a.depth, 0, rows + offset - reinterpret_cast<char*>(out + a.depth));
    std::memcpy(rows + offset, &scale, sizeof scale);
  }
}

template <typename Element>
void dequantize(const LinearArgs& a, const char* rows, int64_t row_stride, int64_t num_rows, int64_t panel,
                void* sums) {
  dequantize_rows(a, num_rows, panel, sums, [&](int64_t r) {
    float scale;
    std::memcpy(&scale, rows + r * row_stride + scale_offset<Element>(a), sizeof scale);
    return scale;
  });
}

}  // namespace
}  // namespace kvforge
