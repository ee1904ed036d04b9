// kvforge::paged_attention on CPU: checks, then the plan's pieces on all threads.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <optional>

#include "native/checks.h"
#include "native/dynamic_for.h"
#include "native/isa.h"
#include "native/ranged_for.h"
#include "native/rotated_keys.h"
#include "native/workspace.h"
#include "paged_attention/cpu_kernel.h"
#include "paged_attention/cpu_plan.h"
#include "paged_attention/cpu_queries.h"
#include "paged_attention/cpu_rows.h"

namespace kvforge {
namespace {

constexpr const char* kOp = "paged_attention";
constexpr int64_t kRotatedTokens = 16;  // that pay for waking a thread
constexpr int64_t kCostPerThread = 20000;  // nanoseconds of work that pay for waking a thread

const AttentionKernel& pick_kernel(const AttentionArgs& args) {
#if defined(__x86_64__)
  const bool bf16 = args.q_bf16 && args.k.type != Dtype::float32 && args.head_dim % 16 == 0 && args.head_dim <= 256;
  switch (current_isa()) {
    case Isa::avx512_bf16:
      if (!bf16) return isa_avx512::fp32_kernel;
      switch (current_tiles()) {
        case Tiles::amx: return isa_amx::bf16_kernel;
        case Tiles::software: return isa_amx_software::bf16_kernel;
        case Tiles::none:
          return args.k.type == Dtype::int8 || args.k.type == Dtype::int4 ? isa_avx512_bf16::vnni_kernel
                                                                          : isa_avx512_bf16::bf16_kernel;
      }
    case Isa::avx512_vnni:
    case Isa::avx512: return isa_avx512::fp32_kernel;
    case Isa::avx2: return isa_avx2::fp32_kernel;
    case Isa::portable: break;
  }
#endif
  return isa_portable::fp32_kernel;
}

void check_step(const AttentionArgs& args, const Step& step, int64_t num_pages) {
  for (int64_t s = 0; s < step.sequences; ++s) {
    const int64_t queries = step.query_start[s + 1] - step.query_start[s], length = step.kv_length[s];
    if (queries == 0) continue;
    TORCH_CHECK(
        length >= queries, kOp, ": kv_length of sequence ", s, " is ", length, ", less than its ", queries, " queries");
    TORCH_CHECK(
        length <= step.max_pages * args.page_size, kOp, ": kv_length of sequence ", s, " is ", length,
        ", more than the ", step.max_pages, " pages of page_table hold");
    const int64_t first = args.window > 0 ? std::max<int64_t>(0, length - queries - args.window + 1) : 0;
    for (int64_t i = first / args.page_size; i <= (length - 1) / args.page_size; ++i) {
      const int64_t page = step.page_table[s * step.max_pages + i];
      TORCH_CHECK(
          page >= 0 && page < num_pages, kOp, ": page_table of sequence ", s, " names page ", page, " but the pools have ",
          num_pages);
    }
  }
}

void run(const AttentionArgs& args, const Step& step, int64_t kv_heads) {
  thread_local Workspace packed_workspace, partial_workspace;
  const AttentionKernel& kernel = pick_kernel(args);
  Plan plan = make_plan(args, step, kv_heads, kernel, at::get_num_threads());
  float* partial = reinterpret_cast<float*>(partial_workspace.get(plan.partial_floats * sizeof(float)));
  const int64_t num_rows_items = static_cast<int64_t>(plan.rows.size());
  const std::unique_ptr<std::atomic<int64_t>[]> remaining(new std::atomic<int64_t>[num_rows_items]);
  for (int64_t i = 0; i < num_rows_items; ++i) {
    remaining[i] = plan.splits[i];
    if (plan.splits[i] > 1) plan.rows[i].partial = partial + plan.partial[i];
  }
  const int64_t scratch_bytes = kernel.scratch_bytes(args, plan.direct_rows);
  for (const Batch& batch : plan.batches) {
    const int64_t threads = batch.cost / kCostPerThread + 1;
    char* packed = packed_workspace.get(batch.packed_bytes);
    dynamic_for(
        batch.packs.size(), threads,
        [&](int64_t i) {
          const Pack& pack = batch.packs[i];
          kernel.pack(args, plan.rows[pack.rows], pack.begin, packed + pack.offset);
        });
    const auto work_of = [&](const Piece& piece) {
      return DirectWork{&plan.rows[piece.rows], piece.count, piece.begin, piece.end, piece.split};
    };
    const auto attend = [&](int64_t i, int64_t next) {
      thread_local Workspace workspace;
      char* scratch = workspace.get(scratch_bytes);
      const Piece& piece = batch.pieces[i];
      const Rows& rows = plan.rows[piece.rows];
      if (piece.direct) {
        DirectWork after;
        if (next >= 0) after = work_of(batch.pieces[next]);
        kernel.direct(args, work_of(piece), next >= 0 && batch.pieces[next].direct ? &after : nullptr, scratch);
      } else {
        float* target =
            rows.partial == nullptr ? nullptr : rows.partial + piece.split * num_rows(rows) * (args.head_dim + 2);
        kernel.tile(args, rows, piece.begin, piece.end, piece.packed < 0 ? nullptr : packed + piece.packed,
                    scratch, target);
      }
      for (int64_t r = piece.rows; r < piece.rows + piece.count; ++r)
        if (plan.splits[r] > 1 && --remaining[r] == 0) kernel.merge(args, plan.rows[r], plan.splits[r]);
    };
    // Pieces of tiles differ in length, the longest come first; those of one step's tokens are neighbours in memory.
    if (batch.has_tiles) dynamic_for(batch.pieces.size(), threads, [&](int64_t i) { attend(i, -1); });
    else ranged_for(batch.pieces.size(), threads, [&] { return attend; });
  }
}

auto rotate_kernel() -> decltype(&isa_portable::rotate_queries) {
#if defined(__x86_64__)
  switch (current_isa()) {
    case Isa::avx512_bf16:
    case Isa::avx512_vnni:
    case Isa::avx512: return &isa_avx512::rotate_queries;
    case Isa::avx2: return &isa_avx2::rotate_queries;
    case Isa::portable: break;
  }
#endif
  return &isa_portable::rotate_queries;
}

// The queries as the heads of a pool are rotated, in their own dtype.
at::Tensor rotated(const at::Tensor& q) {
  at::Tensor out = q.new_empty(q.sizes());
  const QueryRotation args{q.const_data_ptr(), out.mutable_data_ptr(), q.scalar_type() == at::kBFloat16, q.stride(0),
                           q.stride(1), q.size(1), q.size(2)};
  const auto rotate = rotate_kernel();
  at::parallel_for(0, q.size(0), kRotatedTokens, [&](int64_t begin, int64_t end) {
    thread_local Workspace workspace;
    rotate(args, begin, end, reinterpret_cast<float*>(workspace.get(args.head_dim * sizeof(float))));
  });
  return out;
}

PagedTensor paged(const at::Tensor& pool) {
  const int64_t bytes = pool.element_size();
  return {pool.const_data_ptr(), dtype(pool), pool.stride(0), pool.stride(1), pool.stride(2), bytes,
          pool.dim() == 4 ? pool.size(3) * bytes : bytes};
}

PagedTensor paged(const std::optional<at::Tensor>& scales) {
  return scales.has_value() ? paged(*scales) : PagedTensor{};
}

}  // namespace

at::Tensor paged_attention(
    const at::Tensor& q_in, const at::Tensor& k_pool, const at::Tensor& v_pool, const at::Tensor& query_start_in,
    const at::Tensor& kv_length_in, const at::Tensor& page_table_in, double scale, int64_t window,
    const std::optional<at::Tensor>& k_scales, const std::optional<at::Tensor>& v_scales, double k_scale,
    double v_scale, const std::optional<at::Tensor>& sinks_in, bool rotates_keys) {
  check_float(kOp, "q", q_in, 3);
  check_pools(kOp, k_pool, v_pool, true);
  check_scales(kOp, narrower(k_pool, v_pool), k_scales, v_scales, k_scale, v_scale);
  check_rotated(kOp, rotates_keys, k_pool, k_scales);
  const int64_t heads = q_in.size(1), head_dim = q_in.size(2), kv_heads = k_pool.size(2);
  TORCH_CHECK(
      head_dim == head_dim_of(k_pool) && head_dim > 0, kOp, ": q must have the head_dim of the pools, ", head_dim_of(k_pool),
      ", not ", head_dim);
  TORCH_CHECK(
      kv_heads > 0 && heads % kv_heads == 0, kOp, ": q must have a multiple of the pools' ", kv_heads,
      " KV heads, not ", heads);
  TORCH_CHECK(window >= 0, kOp, ": window must be 0 (none) or positive, not ", window);
  TORCH_CHECK(std::isfinite(scale), kOp, ": scale must be finite");
  TORCH_CHECK(
      !sinks_in.has_value() || (sinks_in->scalar_type() == at::kFloat && sinks_in->sizes().equals({heads})), kOp,
      ": sinks must be float32 [", heads, "], one for each head");
  const at::Tensor sinks = sinks_in.has_value() ? sinks_in->contiguous() : at::Tensor();
  const at::Tensor query_start = starts_tensor(kOp, "query_start", query_start_in, q_in.size(0));
  const int64_t sequences = query_start.size(0) - 1;
  const at::Tensor kv_length = int32_tensor(kOp, "kv_length", kv_length_in, {sequences});
  const at::Tensor page_table = int32_tensor(kOp, "page_table", page_table_in, {sequences, -1});
  const at::Tensor plain_q = q_in.stride(2) == 1 ? q_in : q_in.contiguous();
  const at::Tensor q = rotates_keys || is_int4(k_pool) ? rotated(plain_q) : plain_q;
  at::Tensor out = q.new_empty(q.sizes());
  const AttentionArgs args{
      .q = q.const_data_ptr(),
      .out = out.mutable_data_ptr(),
      .q_bf16 = q.scalar_type() == at::kBFloat16,
      .q_token_stride = q.stride(0),
      .q_head_stride = q.stride(1),
      .k = paged(k_pool),
      .v = paged(v_pool),
      .k_scales = paged(k_scales),
      .v_scales = paged(v_scales),
      .k_scale = static_cast<float>(k_scale),
      .v_scale = static_cast<float>(v_scale),
      .heads = heads,
      .group = heads / kv_heads,
      .head_dim = head_dim,
      .page_size = k_pool.size(1),
      .scale = static_cast<float>(scale),
      .window = window,
      .sinks = sinks.defined() ? sinks.const_data_ptr<float>() : nullptr,
  };
  const Step step{
      query_start.const_data_ptr<int32_t>(), kv_length.const_data_ptr<int32_t>(),
      page_table.const_data_ptr<int32_t>(), sequences, page_table.size(1)};
  check_step(args, step, k_pool.size(0));
  if (out.numel() > 0) run(args, step, kv_heads);
  return out;
}

}  // namespace kvforge
