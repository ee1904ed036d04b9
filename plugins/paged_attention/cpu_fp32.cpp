// What is done to a row of the float32 kernel, and the kernel. See cpu_fp32.h.
#include "native/hadamard.h"
#include "paged_attention/cpu_fp32.h"

namespace kvforge {
namespace {

template <bool Masked>
float softmax_row(float* scores, int64_t width, int64_t first, int64_t last, float factor, const float* k_scales,
                  const float* v_scales, float* top) {
  const auto seen = [&](int64_t j) {
    const vint lane = iota() + static_cast<int32_t>(j);
    return (lane >= static_cast<int32_t>(first)) & (lane < static_cast<int32_t>(last));
  };
  const int64_t begin = Masked ? first / kLanes * kLanes : 0, end = Masked ? round_up(last, kLanes) : width;
  vfloat highest = broadcast(-__builtin_inff());
  for (int64_t j = begin; j < end; j += kLanes) {
    vfloat x = load(scores + j) * factor;
    if (k_scales != nullptr) x *= load(k_scales + j);
    if (Masked) x = seen(j) ? x : broadcast(-__builtin_inff());
    store(scores + j, x);
    highest = maximum(x, highest);
  }
  *top = maximum(highest);
  vfloat total{};
  for (int64_t j = begin; j < end; j += kLanes) {
    vfloat p = exp_nonpositive(load(scores + j) - *top);
    total += p;
    if (v_scales != nullptr) p *= load(v_scales + j);
    if (Masked && v_scales != nullptr) p = seen(j) ? p : vfloat{};
    store(scores + j, p);
  }
  if (Masked) {
    std::memset(scores, 0, begin * sizeof(float));
    std::memset(scores + end, 0, (width - end) * sizeof(float));
  }
  return sum(total);
}

void merge(const AttentionArgs& a, const Rows& rows, int64_t splits) {
  const int64_t count = num_rows(rows), dim = a.head_dim, stride = dim + 2;
  for (int64_t r = 0; r < count; ++r) {
    float* first = rows.partial + r * stride;
    KVFORGE_ISA::Fp32RowSums row{first, first[dim], first[dim + 1]};
    for (int64_t s = 1; s < splits; ++s) {
      const float* part = first + s * count * stride;
      KVFORGE_ISA::fp32_add_block(row, part, part[dim], part[dim + 1], dim);
    }
    KVFORGE_ISA::fp32_finish_row(a, rows, rows.row_begin + r, row, nullptr);
  }
}

int64_t scratch_bytes(const AttentionArgs& a, int64_t rows) {
  return larger(KVFORGE_ISA::fp32_tile_scratch_bytes(a), KVFORGE_ISA::fp32_direct_scratch_bytes(a, rows));
}

}  // namespace

namespace KVFORGE_ISA {

float fp32_softmax_row(float* scores, int64_t width, int64_t first, int64_t last, float factor,
                       const float* k_scales, const float* v_scales, float* top) {
  const auto run = first == 0 && last == width ? softmax_row<false> : softmax_row<true>;
  return run(scores, width, first, last, factor, k_scales, v_scales, top);
}

__attribute__((noinline)) void fp32_add_block(Fp32RowSums& row, const float* sums, float top, float total, int64_t dim) {
  if (total == 0) return;  // none of its keys is seen
  const float before = row.top;
  row.top = before > top ? before : top;
  const float shrink = before == row.top ? 1.0f : __builtin_expf(before - row.top);
  const float grow = top == row.top ? 1.0f : __builtin_expf(top - row.top);
  row.total = row.total * shrink + total * grow;
  for (int64_t d = 0; d < dim; ++d) row.sums[d] *= shrink;  // apart: which product would be contracted is not said
  for (int64_t d = 0; d < dim; ++d) row.sums[d] += sums[d] * grow;
}

void fp32_finish_row(const AttentionArgs& a, const Rows& rows, int64_t row, const Fp32RowSums& sums, float* partial) {
  if (partial != nullptr) {
    float* target = partial + (row - rows.row_begin) * (a.head_dim + 2);
    std::memcpy(target, sums.sums, a.head_dim * sizeof(float));
    target[a.head_dim] = sums.top;
    target[a.head_dim + 1] = sums.total;
    return;
  }
  const int64_t offset = token_head(a, rows, row) * a.head_dim;
  const float sink = a.sinks == nullptr ? 0 : __builtin_expf(a.sinks[query_head(a, rows, row)] - sums.top);
  const float inverse = a.v_scale / (sums.total + sink);
  if (a.v.type == Dtype::int4) rotate_blocks(sums.sums, a.head_dim);
  for (int64_t d = 0; d < a.head_dim; ++d) {
    if (a.q_bf16) store(static_cast<bf16*>(a.out) + offset + d, sums.sums[d] * inverse);
    else store(static_cast<float*>(a.out) + offset + d, sums.sums[d] * inverse);
  }
}

extern const AttentionKernel fp32_kernel = {
    fp32_packed_bytes, scratch_bytes, fp32_pack, fp32_tile, fp32_direct, merge, true};

}  // namespace KVFORGE_ISA
}  // namespace kvforge
