// kvforge::grouped_attention on CPU: checks, then pieces of rows on all threads. Their slots are shared out where there are
// too few pieces for the threads; a row's slots are added in their order in any case.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "grouped_attention/cpu_rows.h"
#include "native/checks.h"
#include "native/dynamic_for.h"
#include "native/isa.h"
#include "native/sealed_pages.h"
#include "native/workspace.h"

namespace kvforge {
namespace {

constexpr const char* kOp = "grouped_attention";
constexpr int64_t kPiecesPerThread = 4;
constexpr int64_t kNumbersPerThread = 1 << 17;  // products that pay for waking a thread

struct Step {  // the checked index tensors
  const int32_t *query_start, *kv_length, *page_table, *exact_table;
  int64_t sequences, columns;
};

const GroupedKernel& pick_kernel(const GroupedArgs& args) {
#if defined(__x86_64__)
  switch (current_isa()) {
    case Isa::avx512_bf16: return args.is_bf16 ? isa_avx512_bf16::grouped_kernel : isa_avx512::grouped_kernel;
    case Isa::avx512_vnni:
    case Isa::avx512: return isa_avx512::grouped_kernel;
    case Isa::avx2: return isa_avx2::grouped_kernel;
    case Isa::portable: break;
  }
#endif
  return isa_portable::grouped_kernel;
}

void check_step(const GroupedArgs& args, const Step& step, int64_t exact_pages) {
  const int64_t page_size = args.layout.page_size;
  for (int64_t s = 0; s < step.sequences; ++s) {
    const int64_t queries = step.query_start[s + 1] - step.query_start[s], length = step.kv_length[s];
    if (queries == 0) continue;
    TORCH_CHECK(length >= queries, kOp, ": kv_length of sequence ", s, " is ", length, ", less than its ", queries,
                " queries");
    TORCH_CHECK(length <= step.columns * page_size, kOp, ": kv_length of sequence ", s, " is ", length,
                ", more than the ", step.columns, " pages of page_table hold");
    const int64_t begin = length - queries;
    for (int64_t i = first_key(args, begin) / page_size; i <= (length - 1) / page_size; ++i) {
      const int64_t end = (i + 1) * page_size;  // the first query that reads the page sealed is here or later
      const int64_t reader = std::max(begin, end), page = step.page_table[s * step.columns + i];
      if (reader < length && first_key(args, reader) < end)
        TORCH_CHECK(page >= 0 && page < args.num_pages, kOp, ": page_table of sequence ", s, " names page ", page,
                    " but the pools have ", args.num_pages);
      const int64_t exact = step.exact_table[s * step.columns + i];
      if (end > begin)
        TORCH_CHECK(exact >= 0 && exact < exact_pages, kOp, ": exact_table of sequence ", s, " names page ", exact,
                    " but the exact pools have ", exact_pages);
    }
  }
}

// Rows that are attended at once, and into how many runs of slots their work is divided.
struct Piece {
  GroupedRows rows;
  int64_t slots, runs = 1, partial = 0;  // offset of the partial results, in floats
};

// Slots [begin, end) of a piece.
struct Run {
  int64_t piece, begin, end;
};

std::vector<Piece> make_pieces(const GroupedArgs& args, const Step& step) {
  std::vector<Piece> pieces;
  for (int64_t s = 0; s < step.sequences; ++s) {
    const int64_t queries = step.query_start[s + 1] - step.query_start[s], rows = queries * args.group;
    for (int64_t head = 0; head < args.layout.kv_heads; ++head)
      for (int64_t row = 0; row < rows; row += kPieceRows) {
        const GroupedRows part{step.page_table + s * step.columns, step.exact_table + s * step.columns, head,
                               step.query_start[s], step.kv_length[s] - queries, row, std::min(rows, row + kPieceRows)};
        pieces.push_back({part, num_slots(args, part)});
      }
  }
  const auto cost = [](const Piece& p) { return p.slots * (p.rows.row_end - p.rows.row_begin); };
  std::stable_sort(pieces.begin(), pieces.end(), [&](const Piece& a, const Piece& b) { return cost(a) > cost(b); });
  return pieces;
}

void run(const GroupedArgs& args, const Step& step) {
  thread_local Workspace partial_workspace;
  const GroupedKernel& kernel = pick_kernel(args);
  std::vector<Piece> pieces = make_pieces(args, step);
  int64_t slots = 0, row_slots = 0, partial_floats = 0;
  for (const Piece& piece : pieces) {
    slots += piece.slots;
    row_slots += piece.slots * (piece.rows.row_end - piece.rows.row_begin);
  }
  const int64_t most_threads = 1 + row_slots * kBlock * args.layout.head_dim / kNumbersPerThread;
  const int64_t wanted = std::min<int64_t>(most_threads, at::get_num_threads()) * kPiecesPerThread;
  const bool divides = wanted > kPiecesPerThread && static_cast<int64_t>(pieces.size()) < wanted;
  const int64_t run_slots = divides ? (slots + wanted - 1) / wanted : slots;
  std::vector<Run> runs;
  for (int64_t i = 0; i < static_cast<int64_t>(pieces.size()); ++i) {
    Piece& piece = pieces[i];
    piece.runs = (piece.slots + run_slots - 1) / run_slots;
    piece.partial = partial_floats;
    if (piece.runs > 1)
      partial_floats += piece.slots * (piece.rows.row_end - piece.rows.row_begin) * (args.layout.head_dim + 2);
    for (int64_t begin = 0; begin < piece.slots; begin += run_slots)
      runs.push_back({i, begin, std::min(piece.slots, begin + run_slots)});
  }
  float* const partials = reinterpret_cast<float*>(partial_workspace.get(partial_floats * sizeof(float)));
  const int64_t scratch_bytes = kernel.scratch_bytes(args);
  const auto scratch = [&] {
    thread_local Workspace workspace;
    return workspace.get(scratch_bytes);
  };
  dynamic_for(runs.size(), most_threads, [&](int64_t i) {
    const auto [at, begin, end] = runs[i];
    const Piece& piece = pieces[at];
    kernel.attend(args, piece.rows, begin, end, piece.runs > 1 ? partials + piece.partial : nullptr, scratch());
  });
  if (partial_floats == 0) return;
  dynamic_for(pieces.size(), most_threads, [&](int64_t i) {
    const Piece& piece = pieces[i];
    if (piece.runs > 1) kernel.merge(args, piece.rows, partials + piece.partial, scratch());
  });
}

}  // namespace

at::Tensor grouped_attention(
    const at::Tensor& q_in, const at::Tensor& k_codes, const at::Tensor& v_codes, const at::Tensor& k_groups,
    const at::Tensor& v_groups, const at::Tensor& exact_k, const at::Tensor& exact_v, const at::Tensor& query_start_in,
    const at::Tensor& kv_length_in, const at::Tensor& page_table_in, const at::Tensor& exact_table_in, double scale,
    int64_t window) {
  const SealedLayout layout = check_sealed_pages(kOp, exact_k, exact_v, k_codes, v_codes, k_groups, v_groups);
  check_float(kOp, "q", q_in, 3);
  const int64_t heads = q_in.size(1);
  TORCH_CHECK(q_in.scalar_type() == exact_k.scalar_type(), kOp, ": q must have the dtype of exact_k, ",
              exact_k.scalar_type(), ", not ", q_in.scalar_type());
  TORCH_CHECK(q_in.size(2) == layout.head_dim, kOp, ": q must have the head_dim of the pools, ", layout.head_dim,
              ", not ", q_in.size(2));
  TORCH_CHECK(layout.kv_heads > 0 && heads % layout.kv_heads == 0, kOp, ": q must have a multiple of the pools' ",
              layout.kv_heads, " KV heads, not ", heads);
  TORCH_CHECK(window >= 0, kOp, ": window must be 0 (none) or positive, not ", window);
  TORCH_CHECK(std::isfinite(scale), kOp, ": scale must be finite");
  const at::Tensor query_start = starts_tensor(kOp, "query_start", query_start_in, q_in.size(0));
  const int64_t sequences = query_start.size(0) - 1;
  const at::Tensor kv_length = int32_tensor(kOp, "kv_length", kv_length_in, {sequences});
  const at::Tensor page_table = int32_tensor(kOp, "page_table", page_table_in, {sequences, -1});
  const at::Tensor exact_table = int32_tensor(kOp, "exact_table", exact_table_in, page_table.sizes());
  const at::Tensor q = q_in.stride(2) == 1 ? q_in : q_in.contiguous();
  at::Tensor out = q.new_empty(q.sizes());
  const GroupedArgs args{
      .q = q.const_data_ptr(),
      .out = out.mutable_data_ptr(),
      .is_bf16 = q.scalar_type() == at::kBFloat16,
      .q_token_stride = q.stride(0),
      .q_head_stride = q.stride(1),
      .k_codes = k_codes.const_data_ptr<uint8_t>(),
      .v_codes = v_codes.const_data_ptr<uint8_t>(),
      .k_groups = static_cast<const uint16_t*>(k_groups.const_data_ptr()),
      .v_groups = static_cast<const uint16_t*>(v_groups.const_data_ptr()),
      .exact_k = exact_k.const_data_ptr(),
      .exact_v = exact_v.const_data_ptr(),
      .layout = layout,
      .num_pages = k_codes.size(0),
      .heads = heads,
      .group = heads / layout.kv_heads,
      .scale = static_cast<float>(scale),
      .window = window,
  };
  const Step step{query_start.const_data_ptr<int32_t>(), kv_length.const_data_ptr<int32_t>(),
                  page_table.const_data_ptr<int32_t>(), exact_table.const_data_ptr<int32_t>(), sequences,
                  page_table.size(1)};
  check_step(args, step, exact_k.size(0));
  if (out.numel() > 0) run(args, step);
  return out;
}

}  // namespace kvforge
