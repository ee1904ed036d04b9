// Preparing rows for bfloat16 weights: normed and padded to a whole pair. Used by files that are compiled once per
// instruction set.
#pragma once

#include "packed_linear/cpu_kernel.h"
#include "packed_linear/cpu_norm.h"

namespace kvforge {
namespace {

bool takes_x(const LinearArgs& a) { return a.norm == nullptr && a.x_row == nullptr && a.depth % 2 == 0; }

// An odd number of cache lines, so that the same place of many rows is not in the same set of the cache.
int64_t row_bytes(const LinearArgs& a) { return ((a.depth * 2 + 63) / 64 | 1) * 64; }

void prepare_rows(const LinearArgs& a, int64_t begin, int64_t end, char* rows, char*) {
  for (int64_t r = begin; r < end; ++r, rows += row_bytes(a)) {
    bf16* out = reinterpret_cast<bf16*>(rows);
    const bf16* x = row_of_x(a, r);
    if (a.norm != nullptr) rms_norm(x, a.norm, a.depth, a.eps, out);
    else std::memcpy(out, x, a.depth * sizeof(bf16));
    if (a.depth % 2 != 0) out[a.depth] = 0;
  }
}

}  // namespace
}  // namespace kvforge
