// Queries rotated as the keys of a pool are. Compiled once per instruction set into namespace KVFORGE_ISA, so no inline
// function with external linkage may be used here.
#include "native/cast.h"
#include "native/hadamard.h"
#include "paged_attention/cpu_queries.h"

namespace kvforge {
namespace {

void rotate_head(const float* x, float* out, int64_t dim, float*) {
  for (int64_t d = 0; d < dim; ++d) out[d] = x[d];
  rotate_blocks(out, dim);
}

void rotate_head(const bf16* x, bf16* out, int64_t dim, float* scratch) {
  if ((dim & -dim) <= kLargestRowBlock) return rotate_row(x, dim, out);
  for (int64_t d = 0; d < dim; ++d) scratch[d] = to_float(x[d]);
  rotate_blocks(scratch, dim);
  for (int64_t d = 0; d < dim; ++d) store(out + d, scratch[d]);
}

template <typename T>
void rotate(const QueryRotation& a, int64_t begin, int64_t end, float* scratch) {
  for (int64_t t = begin; t < end; ++t)
    for (int64_t h = 0; h < a.heads; ++h)
      rotate_head(static_cast<const T*>(a.q) + t * a.token_stride + h * a.head_stride,
                  static_cast<T*>(a.out) + (t * a.heads + h) * a.head_dim, a.head_dim, scratch);
}

}  // namespace

namespace KVFORGE_ISA {

void rotate_queries(const QueryRotation& args, int64_t begin, int64_t end, float* scratch) {
  args.bf16 ? rotate<bf16>(args, begin, end, scratch) : rotate<float>(args, begin, end, scratch);
}

}  // namespace KVFORGE_ISA
}  // namespace kvforge
