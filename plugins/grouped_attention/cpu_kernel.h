// What the operator hands to its kernels. A kernel works on rows: row r of one KV head of one sequence is query r / group
// under query head kv_head * group + r % group. Keys are taken in *slots*: first the blocks of kBlock sealed keys, aligned
// to their position, then the parts of kBlock keys of the query's own page.
#pragma once

#include <cstdint>

#include "native/sealed_layout.h"

namespace kvforge {

constexpr int64_t kBlock = 256;   // keys of a slot
constexpr int64_t kPieceRows = 64;  // most rows that are attended at once

struct GroupedArgs {
  const void* q;  // [T, heads, head_dim], strides in elements
  void* out;      // [T, heads, head_dim], contiguous, q's dtype
  bool is_bf16;   // q, out and the exact pages; else they are float32
  int64_t q_token_stride, q_head_stride;
  const uint8_t *k_codes, *v_codes;
  const uint16_t *k_groups, *v_groups;
  const void *exact_k, *exact_v;
  SealedLayout layout;
  int64_t num_pages;  // sealed ones
  int64_t heads, group;
  float scale;
  int64_t window;  // 0: none
};

// Rows [row_begin, row_end) of one KV head of one sequence.
struct GroupedRows {
  const int32_t *pages, *exact;  // the sequence's rows of the tables
  int64_t kv_head;
  int64_t first_token;     // packed index of the sequence's first query
  int64_t first_position;  // and its position
  int64_t row_begin, row_end;
};

// A partial result of a row over one slot: head_dim sums of exp(score - top) * v, then top, then the sum of
// exp(score - top), which is 0 where the row sees none of the keys.
struct GroupedKernel {
  int64_t (*scratch_bytes)(const GroupedArgs& args);
  // Attends rows over slots [begin, end) of num_slots(). Without `partial` these are all, and the result goes to `out`;
  // else the slots' partial results go to `partial`, [slots, rows, head_dim + 2].
  void (*attend)(const GroupedArgs& args, const GroupedRows& rows, int64_t begin, int64_t end, float* partial,
                 char* scratch);
  // Writes the result of rows from the partial results of all their slots.
  void (*merge)(const GroupedArgs& args, const GroupedRows& rows, const float* partial, char* scratch);
};

namespace isa_portable { extern const GroupedKernel grouped_kernel; }
#if defined(__x86_64__)
namespace isa_avx2 { extern const GroupedKernel grouped_kernel; }
namespace isa_avx512 { extern const GroupedKernel grouped_kernel; }
namespace isa_avx512_bf16 { extern const GroupedKernel grouped_kernel; }  // for bfloat16
#endif

}  // namespace kvforge
