// Rotation and write of a range of tokens. Compiled once per instruction set into namespace KVFORGE_ISA, so
// no inline function with external linkage may be used here: the linker would keep one variant of it.
#include "rope_paged_kv_write/cpu_kernel.h"

#include "native/cast.h"

namespace kvforge {
namespace {

template <typename Source, typename Pool>
void rotate(const Source* __restrict__ x, const float* __restrict__ cos, const float* __restrict__ sin,
            Pool* __restrict__ out, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    const float first = to_float(x[i]);
    const float second = to_float(x[i + half]);
    store(out + i, first * cos[i] - second * sin[i]);
    store(out + i + half, second * cos[i] + first * sin[i]);
  }
}

template <typename Source, typename Pool>
void cast(const Source* __restrict__ x, Pool* __restrict__ out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) store(out + i, to_float(x[i]));
}

template <typename Source, typename Pool>
void write(const KvWrite& a, int64_t begin, int64_t end) {
  const int64_t half = a.head_dim / 2;
  for (int64_t t = begin; t < end; ++t) {
    if (a.slot_mapping[t] < 0) continue;
    const int64_t page = a.slot_mapping[t] / a.page_size;
    const int64_t offset = a.slot_mapping[t] % a.page_size;
    const Source* k = static_cast<const Source*>(a.k) + t * a.k_token_stride;
    const Source* v = static_cast<const Source*>(a.v) + t * a.v_token_stride;
    Pool* k_out = static_cast<Pool*>(a.k_pool) + page * a.k_page_stride + offset * a.k_slot_stride;
    Pool* v_out = static_cast<Pool*>(a.v_pool) + page * a.v_page_stride + offset * a.v_slot_stride;
    for (int64_t h = 0; h < a.kv_heads; ++h) {
      rotate(k + h * a.k_head_stride, a.cos + t * half, a.sin + t * half, k_out + h * a.k_pool_head_stride, half);
      cast(v + h * a.v_head_stride, v_out + h * a.v_pool_head_stride, a.head_dim);
    }
  }
}

}  // namespace

namespace KVFORGE_ISA {

void write_tokens(const KvWrite& args, int64_t begin, int64_t end) {
  if (args.source_bf16) {
    args.pool_bf16 ? write<bf16, bf16>(args, begin, end) : write<bf16, float>(args, begin, end);
  } else {
    args.pool_bf16 ? write<float, bf16>(args, begin, end) : write<float, float>(args, begin, end);
  }
}

}  // namespace KVFORGE_ISA
}  // namespace kvforge
