// What the operator hands to the kernels that score and select chunks; they are compiled once per instruction set.
#pragma once

#include <cstdint>

namespace kvforge {

struct LandmarkSelect {
  const void* q;          // [T, heads, head_dim], contiguous
  const void* landmarks;  // [pages, chunks_per_page, kv_heads, head_dim], contiguous
  bool bf16;              // dtype of q and landmarks; else float32
  const uint8_t* is_outlier;  // [pages, chunks_per_page, kv_heads], contiguous
  int64_t chunks_per_page, kv_heads, group, head_dim;
  float scale;
  int32_t* selected;  // [S, kv_heads, max_selected], contiguous, filled with -1
  int64_t max_selected;
};

struct LandmarkSequence {
  int64_t index;         // among the sequences
  int64_t query;         // its row of q
  const int32_t* pages;  // checked
  int64_t chunks, selected;
  int64_t stride;  // of the logits of one query head: chunks rounded up to kLandmarkTile
  float* logits;   // [heads, stride]
  uint8_t* excluded;  // [kv_heads, stride]: 1 for an outlier and past the last chunk
};

constexpr int64_t kLandmarkTile = 16;  // a multiple of every instruction set's lanes

// score_chunks: the logits of chunks [begin, end) of all heads; begin is a multiple of kLandmarkTile.
// select_chunks: the selection of one KV head from its logits; scratch holds `stride` int32.
#define KVFORGE_DECLARE(isa)                                                                                     \
  namespace isa {                                                                                                \
  void score_chunks(const LandmarkSelect& args, const LandmarkSequence& sequence, int64_t begin, int64_t end);   \
  void select_chunks(const LandmarkSelect& args, const LandmarkSequence& sequence, int64_t head, int32_t* scratch); \
  }
KVFORGE_DECLARE(isa_portable)
#if defined(__x86_64__)
KVFORGE_DECLARE(isa_avx2)
KVFORGE_DECLARE(isa_avx512)
KVFORGE_DECLARE(isa_avx512_bf16)
#endif
#undef KVFORGE_DECLARE

}  // namespace kvforge
