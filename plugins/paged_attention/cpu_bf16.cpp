// The kernel for bfloat16 queries and pools on AVX512-BF16. A row has the same bits from tiles and directly: a score is
// four sums over the same dimensions in the same order (cpu_bf16_vectors.h), weights and values are relative to the
// largest score of a key block, and blocks are added one after the other (add_block).
#include "paged_attention/cpu_bf16.h"

namespace kvforge::isa_avx512_bf16 {

static int64_t scratch_bytes(const AttentionArgs& args, int64_t rows) {
  return larger(bf16_tile_scratch_bytes(args), bf16_direct_scratch_bytes(args, rows));
}

extern const AttentionKernel bf16_kernel = {
    bf16_packed_bytes, scratch_bytes, bf16_pack, bf16_tile, bf16_direct, merge_blocks, true};

}  // namespace kvforge::isa_avx512_bf16
