// What the operator hands to the kernels that compute and add up weights; they are compiled once per instruction set.
#pragma once

#include <cstdint>

#include "native/dtype.h"

namespace kvforge {

constexpr int64_t kMassStrip = 32;  // slots that are packed together, a multiple of every instruction set's lanes
constexpr int64_t kMassBlock = 64;  // slots whose statistics are held in registers, a multiple of kMassStrip

struct MassTensor {  // [pages, page_size, kv_heads], strides in elements
  void* data;
  int64_t page_stride, row_stride, head_stride;
};

struct AttentionMass {
  const void* q;  // [T, heads, head_dim], strides in elements
  bool q_bf16;
  Dtype pool;
  int64_t q_token_stride, q_head_stride;
  MassTensor k, k_scales;  // k_scales: float32, or null
  float scale;             // of logits, times k_scale where that holds for all
  int64_t group, head_dim, page_size, kind;
  MassTensor mass, squares;  // float32; squares: null unless kind is 1
};

// Consecutive observed queries of a sequence under one KV head.
struct MassQueries {
  const int32_t *pages, *state_pages;  // checked
  int64_t length;         // slots of the sequence
  int64_t scored;         // slots from here on start at 0
  int64_t kv_head;
  int64_t first_token;    // packed index of the first of them
  int64_t first_visible;  // slots that it sees; each later one sees one more
  int64_t count;
  int64_t width;   // most slots that one sees, rounded up to kMassBlock
  float* weights;  // [count, width]: what each query adds to a slot
  char* packed;    // the keys' strips, or null: they are packed on the way
};

// Bytes of a packed strip; scratch bytes of `weigh` for so many queries, each counted once for each of its KV heads.
// pack: the strips of slots [begin, end), begin a multiple of kMassStrip.
// weigh: the weights of queries [begin, end) of a sequence under num_heads KV heads.
// add: adds all queries' weights, in their order, to the statistics of slots [begin, end), multiples of kMassBlock.
#define KVFORGE_DECLARE(isa)                                                                          \
  namespace isa {                                                                                     \
  int64_t mass_strip_bytes(const AttentionMass& args);                                                \
  int64_t mass_scratch_bytes(const AttentionMass& args, int64_t queries, int64_t width);              \
  void pack_mass_keys(const AttentionMass& args, const MassQueries& queries, int64_t begin, int64_t end); \
  void weigh(const AttentionMass& args, const MassQueries* heads, int64_t num_heads, int64_t begin, int64_t end, \
             char* scratch);                                                                          \
  void add_weights(const AttentionMass& args, const MassQueries& queries, int64_t begin, int64_t end); \
  }
KVFORGE_DECLARE(isa_portable)
#if defined(__x86_64__)
KVFORGE_DECLARE(isa_avx2)
KVFORGE_DECLARE(isa_avx512)
KVFORGE_DECLARE(isa_avx512_bf16)
#endif
#undef KVFORGE_DECLARE

}  // namespace kvforge
