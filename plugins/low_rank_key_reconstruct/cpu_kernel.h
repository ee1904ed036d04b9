// What the operator hands to the kernel that reconstructs keys; it is compiled once per instruction set.
#pragma once

#include <cstdint>

namespace kvforge {

struct KeyReconstruct {
  const void* u;   // [num_rows, rank], contiguous
  const void* sv;  // [sequences, kv_heads, rank, head_dim], contiguous
  bool bf16;       // dtype of u, sv and out; else float32
  const int32_t* rows;       // [N, kv_heads], checked, negative = nothing
  const int32_t* positions;  // [N, kv_heads], checked where rows are not negative
  const float* cos;          // [num_positions, head_dim / 2], contiguous
  const float* sin;
  void* out;  // [N, kv_heads, head_dim], contiguous; not written where rows are negative
  int64_t kv_heads, rank, head_dim;
};

constexpr int64_t kReconstructRows = 6;     // multiplied together
constexpr int64_t kReconstructColumns = 16;  // head_dim is padded to a multiple of it in scratch

// Selections [begin, end) of one sequence, of one KV head; scratch holds (kReconstructRows + rank) * the padded
// head_dim floats.

namespace isa_portable {
void reconstruct_keys(const KeyReconstruct& args, int64_t sequence, int64_t head, int64_t begin, int64_t end,
                      float* scratch);
}
#if defined(__x86_64__)
namespace isa_avx2 {
void reconstruct_keys(const KeyReconstruct& args, int64_t sequence, int64_t head, int64_t begin, int64_t end,
                      float* scratch);
}
namespace isa_avx512 {
void reconstruct_keys(const KeyReconstruct& args, int64_t sequence, int64_t head, int64_t begin, int64_t end,
                      float* scratch);
}
#endif

}  // namespace kvforge
