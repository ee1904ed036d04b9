// What operators hand to the kernel that rebuilds keys; it is compiled once per instruction set.
#pragma once

#include <cstdint>

namespace kvforge {

// The factors of one KV head of one sequence.
struct KeyFactors {
  const void* u;   // [num_rows, rank], contiguous
  const void* sv;  // [rank, head_dim], contiguous
  bool bf16;       // dtype of u, sv, keys and values; else float32
  const float* cos;  // [num_positions, head_dim / 2], contiguous
  const float* sin;
  int64_t rank, head_dim;
};

// One key to rebuild; row and position are checked. Where there is a value [head_dim], it is copied as well.
struct RebuiltKey {
  int64_t row, position;
  void* key;  // [head_dim]
  const void* value;
  void* value_target;
};

constexpr int64_t kReconstructBlock = 24;    // keys that are multiplied, then rotated
constexpr int64_t kReconstructColumns = 16;  // head_dim is padded to a multiple of it in scratch

// Floats of scratch that rebuilding takes.
int64_t reconstruct_scratch(int64_t rank, int64_t head_dim);

#define KVFORGE_DECLARE(isa)                                                                            \
  namespace isa {                                                                                       \
  void rebuild_keys(const KeyFactors& factors, const RebuiltKey* keys, int64_t count, float* scratch);  \
  }
KVFORGE_DECLARE(isa_portable)
#if defined(__x86_64__)
KVFORGE_DECLARE(isa_avx2)
KVFORGE_DECLARE(isa_avx512)
KVFORGE_DECLARE(isa_avx512_bf16)
#endif
#undef KVFORGE_DECLARE

// The one for this processor.
decltype(&isa_portable::rebuild_keys) key_kernel();

}  // namespace kvforge
