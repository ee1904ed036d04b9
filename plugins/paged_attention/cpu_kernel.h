// What the operator hands to its kernels. A kernel works on rows: row r of one KV head of one sequence is
// query r / group under query head kv_head * group + r % group, so that a group shares the keys it reads.
#pragma once

#include <cstdint>

#include "native/dtype.h"

namespace kvforge {

constexpr int64_t kKeyBlock = 256;  // keys of a block and of a split, aligned to their position
constexpr int64_t kTileRows = 128;  // most rows of a tile

struct PagedTensor {  // [pages, page_size, kv_heads, ...], strides in elements
  const void* data;
  Dtype type;
  int64_t page_stride, slot_stride, head_stride;
  int64_t element_bytes, head_bytes;  // of an element, and of all of a head
};

struct AttentionArgs {
  const void* q;  // [T, heads, head_dim], strides in elements
  void* out;      // [T, heads, head_dim], contiguous, q's dtype
  bool q_bf16;
  int64_t q_token_stride, q_head_stride;
  PagedTensor k, v;
  PagedTensor k_scales, v_scales;  // float32 without the last dimension; null data: k_scale and v_scale for all
  float k_scale, v_scale;          // 1 beside k_scales and for float pools
  int64_t heads, group, head_dim, page_size;
  float scale;
  int64_t window;  // 0: none
  const float* sinks;  // of each head, or null
};

// Rows [row_begin, row_end) of one KV head of one sequence.
struct Rows {
  const int32_t* pages;       // the sequence's row of the page table
  int64_t kv_head;
  int64_t first_token;        // packed index of the sequence's first query
  int64_t first_position;     // and its position
  int64_t first_key;          // no query of the sequence needs a key before this one
  int64_t end_key;            // length of the sequence
  int64_t row_begin, row_end;
  float* partial;             // [splits, rows, head_dim + 2], or null: the result goes to `out`
};

// Rows of `count` KV heads of one sequence over keys [begin, end) of one block.
struct DirectWork {
  const Rows* heads;
  int64_t count, begin, end, split;
};

// A partial result of a row over some keys: head_dim sums of exp(score - top) * v, then top, then the sum of
// exp(score - top); top = -inf when the row sees none of the keys. The units of top are the kernel's.
struct AttentionKernel {
  // Bytes of a packed key block, and of a thread's scratch when direct() gets up to `rows` rows at once.
  int64_t (*packed_bytes)(const AttentionArgs& args);
  int64_t (*scratch_bytes)(const AttentionArgs& args, int64_t rows);
  // Packs the key block that starts at key `begin`, zeros in place of keys the sequence does not need.
  void (*pack)(const AttentionArgs& args, const Rows& rows, int64_t begin, char* packed);
  // Attends up to kTileRows rows over keys [begin, end). `packed` holds the blocks from begin / kKeyBlock on;
  // when it is null they are packed on the way.
  void (*tile)(const AttentionArgs& args, const Rows& rows, int64_t begin, int64_t end, const char* packed,
               char* scratch, float* partial);
  // Attends rows straight from the pools. `next` is what the thread expects to attend after them, or null: it may be
  // fetched meanwhile.
  void (*direct)(const AttentionArgs& args, const DirectWork& work, const DirectWork* next, char* scratch);
  // Writes the result of rows whose keys were split, from their partial results in the order of the keys.
  void (*merge)(const AttentionArgs& args, const Rows& rows, int64_t splits);
  // Whether a row has the same bits by tile() and by direct(), with its keys split at any blocks; a split is then a
  // block.
  bool same_bits;
  // Most rows of a KV head that direct() gets.
  int64_t max_direct_rows = INT64_MAX;
};

namespace isa_portable { extern const AttentionKernel fp32_kernel; }
#if defined(__x86_64__)
namespace isa_avx2 { extern const AttentionKernel fp32_kernel; }
namespace isa_avx512 { extern const AttentionKernel fp32_kernel; }
// For q in bfloat16, pools not in float32, head_dim a multiple of 16, at most 256. K and V are of one type, or each of
// int8 or int4.
namespace isa_avx512_bf16 {
extern const AttentionKernel bf16_kernel;  // for pools of bfloat16 and fp8
extern const AttentionKernel vnni_kernel;  // for pools of int8 and int4
}  // namespace isa_avx512_bf16
namespace isa_amx_software { extern const AttentionKernel bf16_kernel; }
namespace isa_amx { extern const AttentionKernel bf16_kernel; }
#endif

}  // namespace kvforge
