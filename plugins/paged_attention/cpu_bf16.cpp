// The kernel for bfloat16 queries and pools on AVX512-BF16.
#include "paged_attention/cpu_bf16.h"

namespace kvforge::isa_avx512 {

static int64_t scratch_bytes(const AttentionArgs& args, int64_t rows) {
  return larger(bf16_tile_scratch_bytes(args), bf16_direct_scratch_bytes(args, rows));
}

extern const AttentionKernel bf16_kernel = {bf16_packed_bytes, scratch_bytes, bf16_pack, bf16_tile, bf16_direct};

}  // namespace kvforge::isa_avx512
