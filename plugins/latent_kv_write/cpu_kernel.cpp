// Rotation and write of a range of rows. Compiled once per instruction set into namespace KVFORGE_ISA, so no inline
// function with external linkage may be used here: the linker would keep one variant of it.
#include "latent_kv_write/cpu_kernel.h"

#include "native/cast.h"
#include "native/quantize.h"

namespace kvforge {
namespace {

template <typename Source>
void rotate(const Source* __restrict__ x, const float* __restrict__ cos, const float* __restrict__ sin,
            float* __restrict__ out, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    const float first = to_float(x[i]);
    const float second = to_float(x[i + half]);
    out[i] = first * cos[i] - second * sin[i];
    out[i + half] = second * cos[i] + first * sin[i];
  }
}

template <typename Source, typename Target>
void write(const LatentWrite& a, int64_t begin, int64_t end, float* __restrict__ row) {
  const int64_t half = a.rope_dim / 2, passed = a.width - a.rope_dim;
  for (int64_t t = begin; t < end; ++t) {
    if (a.slot_mapping[t] < 0) continue;
    const int64_t page = a.slot_mapping[t] / a.page_size, slot = a.slot_mapping[t] % a.page_size;
    const Source* x = static_cast<const Source*>(a.rows) + t * a.token_stride;
    for (int64_t i = 0; i < passed; ++i) row[i] = to_float(x[i]);
    rotate(x + passed, a.cos + t * half, a.sin + t * half, row + passed, half);
    Target* out = static_cast<Target*>(a.pool) + page * a.page_stride + slot * a.slot_stride;
    if constexpr (sizeof(Target) == 1) {
      const float scale = dynamic_scale(row, a.width, largest(Target{}));
      a.scales[page * a.scales_page_stride + slot * a.scales_slot_stride] = scale;
      quantize(row, scale, out, a.width);
    } else {
      for (int64_t i = 0; i < a.width; ++i) store(out + i, row[i]);
    }
  }
}

template <typename Source>
void write_from(const LatentWrite& a, int64_t begin, int64_t end, float* scratch) {
  switch (a.pool_dtype) {
    case Dtype::float32: return write<Source, float>(a, begin, end, scratch);
    case Dtype::bfloat16: return write<Source, bf16>(a, begin, end, scratch);
    case Dtype::fp8: return write<Source, fp8>(a, begin, end, scratch);
    case Dtype::int8: return write<Source, int8_t>(a, begin, end, scratch);
    case Dtype::int4: return;  // refused before
  }
}

}  // namespace

namespace KVFORGE_ISA {

void write_rows(const LatentWrite& args, int64_t begin, int64_t end, float* scratch) {
  args.source_bf16 ? write_from<bf16>(args, begin, end, scratch) : write_from<float>(args, begin, end, scratch);
}

}  // namespace KVFORGE_ISA
}  // namespace kvforge
