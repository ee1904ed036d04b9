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

// Writes what take(x, token, out) makes of each vector x of the tokens.
template <typename Source, typename Target, typename Take>
void write(const KvWrite& a, const KvSource& source, const KvTarget& pool, int64_t begin, int64_t end, float* scratch,
           const Take& take) {
  for (int64_t t = begin; t < end; ++t) {
    if (a.slot_mapping[t] < 0) continue;
    const int64_t page = a.slot_mapping[t] / a.page_size, slot = a.slot_mapping[t] % a.page_size;
    for (int64_t h = 0; h < a.kv_heads; ++h) {
      const Source* x = static_cast<const Source*>(source.data) + t * source.token_stride + h * source.head_stride;
      if constexpr (sizeof(Target) == 1) {
        take(x, t, scratch);
        if (pool.rotated) rotate_blocks(scratch, a.head_dim);
        put<Target>(pool, page, slot, h, scratch, a.head_dim);
      } else {
        take(x, t, static_cast<Target*>(pool.data) + page * pool.page_stride + slot * pool.slot_stride +
                       h * pool.head_stride);
      }
    }
  }
}

template <typename Source, typename Take>
void write_to(const KvWrite& a, const KvSource& source, const KvTarget& pool, int64_t begin, int64_t end, float* scratch,
              const Take& take) {
  switch (pool.type) {
    case Dtype::float32: return write<Source, float>(a, source, pool, begin, end, scratch, take);
    case Dtype::bfloat16: return write<Source, bf16>(a, source, pool, begin, end, scratch, take);
    case Dtype::fp8: return write<Source, fp8>(a, source, pool, begin, end, scratch, take);
    case Dtype::int8: return write<Source, int8_t>(a, source, pool, begin, end, scratch, take);
    case Dtype::int4: return write<Source, int4>(a, source, pool, begin, end, scratch, take);
  }
}

template <typename Source>
void write_from(const KvWrite& a, int64_t begin, int64_t end, float* scratch) {
  const int64_t half = a.head_dim / 2;
  write_to<Source>(a, a.k, a.k_pool, begin, end, scratch, [&](const Source* x, int64_t t, auto* out) {
    rotate(x, a.cos + t * half, a.sin + t * half, out, half);
  });
  write_to<Source>(a, a.v, a.v_pool, begin, end, scratch,
                   [&](const Source* x, int64_t, auto* out) { cast(x, out, a.head_dim); });
}

}  // namespace

namespace KVFORGE_ISA {

void write_tokens(const KvWrite& args, int64_t begin, int64_t end, float* scratch) {
  args.source_bf16 ? write_from<bf16>(args, begin, end, scratch) : write_from<float>(args, begin, end, scratch);
}

}  // namespace KVFORGE_ISA
}  // namespace kvforge
