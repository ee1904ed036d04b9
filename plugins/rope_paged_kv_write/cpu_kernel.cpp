// Rotation and write of a range of tokens. Compiled once per instruction set into namespace KVFORGE_ISA, so
// no inline function with external linkage may be used here: the linker would keep one variant of it.
#include "rope_paged_kv_write/cpu_kernel.h"

#include "native/cast.h"
#include "native/hadamard.h"
#include "native/quantize.h"

namespace kvforge {
namespace {

template <typename Source, typename Target>
void rotate(const Source* __restrict__ x, const float* __restrict__ cos, const float* __restrict__ sin,
            Target* __restrict__ out, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    const float first = to_float(x[i]);
    const float second = to_float(x[i + half]);
    store(out + i, first * cos[i] - second * sin[i]);
    store(out + i + half, second * cos[i] + first * sin[i]);
  }
}

template <typename Source, typename Target>
void cast(const Source* __restrict__ x, Target* __restrict__ out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) store(out + i, to_float(x[i]));
}

// One vector, quantized.
template <typename Target>
void put(const KvTarget& pool, int64_t page, int64_t slot, int64_t head, const float* x, int64_t count) {
  Target* out = static_cast<Target*>(pool.data) + page * pool.page_stride + slot * pool.slot_stride +
      head * pool.head_stride;
  float scale = pool.scale;
  if (pool.scales != nullptr) {
    scale = dynamic_scale(x, count, largest(Target{}));
    pool.scales[page * pool.scales_page_stride + slot * pool.scales_slot_stride + head * pool.scales_head_stride] =
        scale;
  }
  quantize(x, scale, out, count);
}

template <typename Source, typename Target>
void write(const KvWrite& a, int64_t begin, int64_t end, float* scratch) {
  const int64_t half = a.head_dim / 2;
  for (int64_t t = begin; t < end; ++t) {
    if (a.slot_mapping[t] < 0) continue;
    const int64_t page = a.slot_mapping[t] / a.page_size, slot = a.slot_mapping[t] % a.page_size;
    const float *cos = a.cos + t * half, *sin = a.sin + t * half;
    for (int64_t h = 0; h < a.kv_heads; ++h) {
      const Source* k = static_cast<const Source*>(a.k.data) + t * a.k.token_stride + h * a.k.head_stride;
      const Source* v = static_cast<const Source*>(a.v.data) + t * a.v.token_stride + h * a.v.head_stride;
      if constexpr (sizeof(Target) == 1) {
        rotate(k, cos, sin, scratch, half);
        if constexpr (std::is_same_v<Target, int4>) rotate_blocks(scratch, a.head_dim);
        put<Target>(a.k_pool, page, slot, h, scratch, a.head_dim);
        cast(v, scratch, a.head_dim);
        if constexpr (std::is_same_v<Target, int4>) rotate_blocks(scratch, a.head_dim);
        put<Target>(a.v_pool, page, slot, h, scratch, a.head_dim);
      } else {
        const auto out = [&](const KvTarget& pool) {
          return static_cast<Target*>(pool.data) + page * pool.page_stride + slot * pool.slot_stride +
              h * pool.head_stride;
        };
        rotate(k, cos, sin, out(a.k_pool), half);
        cast(v, out(a.v_pool), a.head_dim);
      }
    }
  }
}

template <typename Source>
void write_from(const KvWrite& a, int64_t begin, int64_t end, float* scratch) {
  switch (a.pool) {
    case Dtype::float32: return write<Source, float>(a, begin, end, scratch);
    case Dtype::bfloat16: return write<Source, bf16>(a, begin, end, scratch);
    case Dtype::fp8: return write<Source, fp8>(a, begin, end, scratch);
    case Dtype::int8: return write<Source, int8_t>(a, begin, end, scratch);
    case Dtype::int4: return write<Source, int4>(a, begin, end, scratch);
  }
}

}  // namespace

namespace KVFORGE_ISA {

void write_tokens(const KvWrite& args, int64_t begin, int64_t end, float* scratch) {
  args.source_bf16 ? write_from<bf16>(args, begin, end, scratch) : write_from<float>(args, begin, end, scratch);
}

}  // namespace KVFORGE_ISA
}  // namespace kvforge
