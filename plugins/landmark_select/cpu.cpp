// kvforge::landmark_select on CPU: checks, then the kernels over blocks of chunks and over (sequence, KV head).
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <vector>

#include "landmark_select/cpu_kernel.h"
#include "native/checks.h"
#include "native/dynamic_for.h"
#include "native/isa.h"
#include "native/workspace.h"

namespace kvforge {
namespace {

constexpr const char* kOp = "landmark_select";
constexpr int64_t kBlockElements = 1 << 16;    // of landmarks that a thread takes at once
constexpr int64_t kElementsPerThread = 1 << 17;  // of landmarks that pay for waking a thread

struct Kernels {
  decltype(&isa_portable::score_chunks) score;
  decltype(&isa_portable::select_chunks) select;
};

Kernels kernels() {
#if defined(__x86_64__)
  switch (current_isa()) {
    case Isa::avx512_bf16: return {&isa_avx512_bf16::score_chunks, &isa_avx512_bf16::select_chunks};
    case Isa::avx512_vnni:
    case Isa::avx512: return {&isa_avx512::score_chunks, &isa_avx512::select_chunks};
    case Isa::avx2: return {&isa_avx2::score_chunks, &isa_avx2::select_chunks};
    case Isa::portable: break;
  }
#endif
  return {&isa_portable::score_chunks, &isa_portable::select_chunks};
}

struct Block {
  int64_t sequence, begin, end;
};

}  // namespace

at::Tensor landmark_select(
    const at::Tensor& q_in, const at::Tensor& landmarks_in, const at::Tensor& is_outlier_in,
    const at::Tensor& query_start_in, const at::Tensor& table_in, const at::Tensor& num_chunks_in,
    const at::Tensor& num_selected_in, double scale, int64_t max_selected) {
  check_float(kOp, "q", q_in, 3);
  check_float(kOp, "landmarks", landmarks_in, 4);
  const int64_t chunks_per_page = landmarks_in.size(1), kv_heads = landmarks_in.size(2);
  const int64_t heads = q_in.size(1), head_dim = q_in.size(2);
  TORCH_CHECK(landmarks_in.scalar_type() == q_in.scalar_type(), kOp, ": landmarks must have the dtype of q, ",
              q_in.scalar_type(), ", not ", landmarks_in.scalar_type());
  TORCH_CHECK(landmarks_in.size(3) == head_dim, kOp, ": landmarks must have the head_dim of q, ", head_dim, ", not ",
              landmarks_in.size(3));
  TORCH_CHECK(kv_heads > 0 && heads % kv_heads == 0, kOp, ": landmarks must have a number of KV heads that divides ",
              heads, ", the heads of q, not ", kv_heads);
  TORCH_CHECK(chunks_per_page > 0, kOp, ": landmarks must have at least one chunk in a page");
  TORCH_CHECK(is_outlier_in.scalar_type() == at::kByte, kOp, ": is_outlier must be uint8, not ",
              is_outlier_in.scalar_type());
  TORCH_CHECK(is_outlier_in.sizes() == landmarks_in.sizes().slice(0, 3), kOp, ": is_outlier must have shape ",
              landmarks_in.sizes().slice(0, 3), ", not ", is_outlier_in.sizes());
  TORCH_CHECK(max_selected >= 0, kOp, ": max_selected must not be negative, but is ", max_selected);
  const at::Tensor query_start = starts_tensor(kOp, "query_start", query_start_in, q_in.size(0));
  const int64_t sequences = query_start.size(0) - 1;
  const at::Tensor table = int32_tensor(kOp, "table", table_in, {sequences, -1});
  const at::Tensor num_chunks = int32_tensor(kOp, "num_chunks", num_chunks_in, {sequences});
  const at::Tensor num_selected = int32_tensor(kOp, "num_selected", num_selected_in, {sequences});
  at::Tensor out = table.new_empty({sequences, kv_heads, max_selected});
  int32_t* selected = out.mutable_data_ptr<int32_t>();
  std::fill_n(selected, out.numel(), -1);

  std::vector<LandmarkSequence> found;
  int64_t num_logits = 0, longest = 0, chunks_in_all = 0;
  for (int64_t s = 0; s < sequences; ++s) {
    const int64_t chunks = num_chunks.const_data_ptr<int32_t>()[s], wanted = num_selected.const_data_ptr<int32_t>()[s];
    const int32_t *pages = table.const_data_ptr<int32_t>() + s * table.size(1),
                  *start = query_start.const_data_ptr<int32_t>() + s;
    TORCH_CHECK(chunks >= 0 && chunks <= table.size(1) * chunks_per_page, kOp, ": num_chunks holds ", chunks,
                " but table has room for ", table.size(1) * chunks_per_page);
    TORCH_CHECK(wanted >= 0 && wanted <= max_selected, kOp, ": num_selected holds ", wanted, " but max_selected is ",
                max_selected);
    for (int64_t page = 0; page * chunks_per_page < chunks; ++page)
      TORCH_CHECK(pages[page] >= 0 && pages[page] < landmarks_in.size(0), kOp, ": table holds page ", pages[page],
                  " but landmarks have ", landmarks_in.size(0));
    if (chunks == 0 || wanted == 0 || start[0] == start[1]) continue;
    const int64_t stride = (chunks + kLandmarkTile - 1) / kLandmarkTile * kLandmarkTile;
    found.push_back({s, start[1] - 1, pages, chunks, wanted, stride, nullptr, nullptr});
    num_logits += heads * stride;
    longest = std::max(longest, stride);
    chunks_in_all += chunks;
  }
  if (found.empty() || heads == 0) return out;

  const at::Tensor q = q_in.contiguous(), landmarks = landmarks_in.contiguous(), is_outlier = is_outlier_in.contiguous();
  const LandmarkSelect args{
      .q = q.const_data_ptr(),
      .landmarks = landmarks.const_data_ptr(),
      .bf16 = q.scalar_type() == at::kBFloat16,
      .is_outlier = is_outlier.const_data_ptr<uint8_t>(),
      .chunks_per_page = chunks_per_page,
      .kv_heads = kv_heads,
      .group = heads / kv_heads,
      .head_dim = head_dim,
      .scale = static_cast<float>(scale),
      .selected = selected,
      .max_selected = max_selected,
  };
  thread_local Workspace all_logits;
  float* logits = reinterpret_cast<float*>(all_logits.get(num_logits * (sizeof(float) + 1)));
  uint8_t* excluded = reinterpret_cast<uint8_t*>(logits + num_logits);
  const int64_t row_elements = std::max<int64_t>(1, kv_heads * head_dim);
  const int64_t step = (kBlockElements / row_elements + kLandmarkTile) / kLandmarkTile * kLandmarkTile;
  std::vector<Block> blocks;
  for (size_t i = 0; i < found.size(); ++i) {
    found[i].logits = logits;
    logits += heads * found[i].stride;
    found[i].excluded = excluded;
    excluded += kv_heads * found[i].stride;
    for (int64_t begin = 0; begin < found[i].chunks; begin += step)
      blocks.push_back({static_cast<int64_t>(i), begin, std::min(found[i].chunks, begin + step)});
  }
  const Kernels run = kernels();
  const int64_t threads = 1 + chunks_in_all * row_elements / kElementsPerThread;
  dynamic_for(blocks.size(), threads, [&](int64_t i) {
    run.score(args, found[blocks[i].sequence], blocks[i].begin, blocks[i].end);
  });
  dynamic_for(found.size() * kv_heads, threads, [&](int64_t i) {
    thread_local Workspace keys;
    run.select(args, found[i / kv_heads], i % kv_heads, reinterpret_cast<int32_t*>(keys.get(longest * sizeof(int32_t))));
  });
  return out;
}

}  // namespace kvforge
