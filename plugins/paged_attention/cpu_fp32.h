// The kernel in float32 arithmetic for every dtype and head_dim: what its tiles and its direct part share. A row has the
// same bits from both: a score is summed in the order of the dimensions, weights and values in the order of the keys of a
// block and relative to the block's largest score, and blocks are added one after the other (fp32_add_block).
// Compiled once per instruction set into namespace KVFORGE_ISA, so no inline function with external linkage may be used
// here.
#pragma once

#include "native/simd.h"
#include "paged_attention/cpu_kernel.h"
#include "paged_attention/cpu_rows.h"
#include "paged_attention/cpu_scales.h"

namespace kvforge {
namespace KVFORGE_ISA {

// A row's sums over all the key blocks so far: `sums` of weight * v, and the sum of the weights, exp(score - top).
struct Fp32RowSums {
  float* sums;
  float top = -__builtin_inff(), total = 0;
};

// Not inline, so that the compiler contracts products and sums in one way.
//
// Turns scores[0 .. width) into weights: exp(x - top) for [first, last) and 0 elsewhere, where x is factor * score * K's
// scale and top the largest of these; what is stored then carries V's scale. Returns the sum without it. width is a
// multiple of kLanes, first < last.
float fp32_softmax_row(float* scores, int64_t width, int64_t first, int64_t last, float factor,
                       const float* k_scales, const float* v_scales, float* top);
// Adds the sums over one more block, which has a top of its own.
void fp32_add_block(Fp32RowSums& row, const float* sums, float top, float total, int64_t dim);
void fp32_finish_row(const AttentionArgs& args, const Rows& rows, int64_t row, const Fp32RowSums& sums,
                     float* partial);

// Tiles, in cpu_fp32_tile.cpp.
int64_t fp32_packed_bytes(const AttentionArgs& args);
int64_t fp32_tile_scratch_bytes(const AttentionArgs& args);
void fp32_pack(const AttentionArgs& args, const Rows& rows, int64_t begin, char* packed);
void fp32_tile(const AttentionArgs& args, const Rows& rows, int64_t begin, int64_t end, const char* packed,
               char* scratch, float* partial);

// Few rows per key, in cpu_fp32_direct.cpp.
int64_t fp32_direct_scratch_bytes(const AttentionArgs& args, int64_t rows);
void fp32_direct(const AttentionArgs& args, const DirectWork& work, const DirectWork* next, char* scratch);

}  // namespace KVFORGE_ISA

namespace {

// head_dim rounded up to whole vectors of every instruction set.
inline int64_t padded_dim(const AttentionArgs& a) { return round_up(a.head_dim, 16); }

inline void load_queries(const AttentionArgs& a, const Rows& rows, float* out) {
  for (int64_t r = rows.row_begin; r < rows.row_end; ++r, out += a.head_dim) {
    const int64_t offset = query_offset(a, rows, r);
    for (int64_t d = 0; d < a.head_dim; ++d)
      out[d] = a.q_bf16 ? to_float(static_cast<const bf16*>(a.q)[offset + d]) : static_cast<const float*>(a.q)[offset + d];
  }
}

}  // namespace
}  // namespace kvforge
