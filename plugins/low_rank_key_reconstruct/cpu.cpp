// kvforge::low_rank_key_reconstruct on CPU: checks, then the kernel over pieces of (sequence, KV head).
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <numeric>
#include <vector>

#include "low_rank_key_reconstruct/cpu_kernel.h"
#include "low_rank_key_reconstruct/cpu_lists.h"
#include "native/checks.h"
#include "native/dynamic_for.h"
#include "native/isa.h"
#include "native/workspace.h"

namespace kvforge {
namespace {

constexpr const char* kOp = "low_rank_key_reconstruct";
constexpr int64_t kFewestPieceTokens = 256;

}  // namespace

int64_t reconstruct_scratch(int64_t rank, int64_t head_dim) {
  const int64_t padded = (head_dim + kReconstructColumns - 1) / kReconstructColumns * kReconstructColumns;
  return (kReconstructBlock + rank + 1) * padded;
}

decltype(&isa_portable::rebuild_keys) key_kernel() {
#if defined(__x86_64__)
  switch (current_isa()) {
    case Isa::avx512_bf16: return &isa_avx512_bf16::rebuild_keys;
    case Isa::avx512_vnni:
    case Isa::avx512: return &isa_avx512::rebuild_keys;
    case Isa::avx2: return &isa_avx2::rebuild_keys;
    case Isa::portable: break;
  }
#endif
  return &isa_portable::rebuild_keys;
}

at::Tensor low_rank_key_reconstruct(
    const at::Tensor& u_in, const at::Tensor& sv_in, const at::Tensor& slot_in, const at::Tensor& chunks_in,
    const at::Tensor& shadow_table_in, const at::Tensor& cos_in, const at::Tensor& sin_in, int64_t chunk_size) {
  check_float(kOp, "u", u_in, 3);
  check_float(kOp, "sv", sv_in, 4);
  const int64_t kv_heads = sv_in.size(1), rank = sv_in.size(2), head_dim = sv_in.size(3);
  const int64_t page_size = u_in.size(1);
  TORCH_CHECK(sv_in.scalar_type() == u_in.scalar_type(), kOp, ": sv must have the dtype of u, ", u_in.scalar_type(),
              ", not ", sv_in.scalar_type());
  TORCH_CHECK(rank == u_in.size(2), kOp, ": sv must have the rank of u, ", u_in.size(2), ", not ", rank);
  TORCH_CHECK(head_dim % 2 == 0, kOp, ": sv must have an even head_dim, not ", head_dim);
  check_chunk_size(kOp, chunk_size, page_size);
  check_dims(kOp, "chunks", chunks_in, 3);
  const int64_t sequences = chunks_in.size(0), length = chunks_in.size(2);
  const at::Tensor chunks = int32_tensor(kOp, "chunks", chunks_in, {sequences, kv_heads, length});
  const at::Tensor slot = int32_tensor(kOp, "slot", slot_in, {sequences});
  const at::Tensor shadow_table = int32_tensor(kOp, "shadow_table", shadow_table_in, {sequences, -1});
  const at::Tensor cos = float32_tensor(kOp, "cos", cos_in, {-1, head_dim / 2});
  const at::Tensor sin = float32_tensor(kOp, "sin", sin_in, {cos.size(0), head_dim / 2});
  const auto pages = [&](int64_t s) {
    return ChunkPages(kOp, "shadow_table", shadow_table, s, page_size, u_in.size(0));
  };
  const std::vector<int64_t> counts = check_lists(
      kOp, chunks, slot, sv_in.size(0), cos.size(0), chunk_size, pages, [](int64_t, int64_t) {});
  const int64_t total = std::accumulate(counts.begin(), counts.end(), int64_t{0}) * chunk_size;
  const at::Tensor u = u_in.contiguous(), sv = sv_in.contiguous();
  at::Tensor out = u.new_empty({sequences, kv_heads, length * chunk_size, head_dim});
  if (total == 0 || head_dim == 0) return out;

  const int32_t *listed = chunks.const_data_ptr<int32_t>(), *slots = slot.const_data_ptr<int32_t>();
  const std::vector<ListPiece> pieces =
      pieces_of_lists(counts, kv_heads, chunk_size, kFewestPieceTokens, total, at::get_num_threads());
  const auto rebuild_keys = key_kernel();
  const int64_t key_bytes = head_dim * out.element_size();
  char* keys = static_cast<char*>(out.mutable_data_ptr());
  dynamic_for(pieces.size(), 1 + total * head_dim * rank / kProductsPerThread, [&](int64_t i) {
    thread_local Workspace workspace;
    thread_local std::vector<RebuiltKey> wanted;
    const auto [s, head, begin, end] = pieces[i];
    const ChunkPages from = pages(s);
    const int64_t first = (s * kv_heads + head) * length;
    const KeyFactors factors{
        .u = u.const_data_ptr(),
        .sv = static_cast<const char*>(sv.const_data_ptr()) + (slots[s] * kv_heads + head) * rank * key_bytes,
        .bf16 = u.scalar_type() == at::kBFloat16,
        .cos = cos.const_data_ptr<float>(),
        .sin = sin.const_data_ptr<float>(),
        .rank = rank,
        .head_dim = head_dim,
    };
    wanted.clear();
    for (int64_t j = first + begin; j < first + end; ++j) {
      const auto [page, offset] = from.find(listed[j] * chunk_size);
      for (int64_t t = 0; t < chunk_size; ++t)
        wanted.push_back({page * page_size + offset + t, listed[j] * chunk_size + t,
                          keys + (j * chunk_size + t) * key_bytes, nullptr, nullptr});
    }
    float* scratch =
        reinterpret_cast<float*>(workspace.get(reconstruct_scratch(rank, head_dim) * sizeof(float)));
    rebuild_keys(factors, wanted.data(), wanted.size(), scratch);
  });
  return out;
}

}  // namespace kvforge
