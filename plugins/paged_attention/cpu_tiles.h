// What the two halves of the kernel for AMX's tiles share. Compiled into namespace KVFORGE_ISA; the rest here has internal
// linkage (see cpu_bf16.h).
#pragma once

#include "native/tiles.h"
#include "paged_attention/cpu_bf16_load.h"
#include "paged_attention/cpu_transpose.h"

namespace kvforge {

namespace KVFORGE_ISA {

// Few rows per key, in cpu_tiles_direct.cpp.
int64_t tiles_direct_scratch_bytes(const AttentionArgs& args);
void tiles_direct(const AttentionArgs& args, const DirectWork& work, const DirectWork* next, char* scratch);

}  // namespace KVFORGE_ISA

namespace {

constexpr int64_t kStep = 32;  // dimensions or keys of a product of tiles of bfloat16
// Bytes from row to row of direct(): an odd number of cache lines, so that the rows of a tile lie in different sets of the cache.
constexpr int64_t kScoreRow = (kKeyBlock + 16) * 4;
constexpr int64_t kWeightRow = (kKeyBlock + 32) * 2;

// 16 vectors, as rows, become the right operand of a product: 4 bytes by vector.
inline void store_transposed(__m512i x[16], char* tile) {
  transpose(x);
  for (int i = 0; i < 16; ++i) _mm512_storeu_si512(tile + i * kTileRowBytes, x[i]);
}

}  // namespace
}  // namespace kvforge
