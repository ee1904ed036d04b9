// kvforge::low_rank_key_reconstruct on CPU: checks, then the kernel over pieces of (sequence, KV head).
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <vector>

#include "low_rank_key_reconstruct/cpu_kernel.h"
#include "native/checks.h"
#include "native/dynamic_for.h"
#include "native/isa.h"
#include "native/workspace.h"

namespace kvforge {
namespace {

constexpr const char* kOp = "low_rank_key_reconstruct";
constexpr int64_t kFewestPieceRows = 256;  // each piece packs SV of its head
constexpr int64_t kPiecesPerThread = 8;
constexpr int64_t kProductsPerThread = 1 << 18;  // multiplications that pay for waking a thread

struct Piece {
  int64_t sequence, head, begin, end;
};

// How many there are.
int64_t check_selections(const int32_t* rows, const int32_t* positions, int64_t count, int64_t num_rows,
                         int64_t num_positions) {
  int64_t found = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (rows[i] < 0) continue;
    TORCH_CHECK(rows[i] < num_rows, kOp, ": rows names row ", rows[i], " but u has ", num_rows);
    TORCH_CHECK(
        positions[i] >= 0 && positions[i] < num_positions, kOp, ": positions names position ", positions[i],
        " but cos and sin have ", num_positions);
    ++found;
  }
  return found;
}

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
    const at::Tensor& u_in, const at::Tensor& sv_in, const at::Tensor& selected_start_in, const at::Tensor& rows_in,
    const at::Tensor& positions_in, const at::Tensor& cos_in, const at::Tensor& sin_in) {
  check_float(kOp, "u", u_in, 2);
  check_float(kOp, "sv", sv_in, 4);
  const int64_t kv_heads = sv_in.size(1), rank = sv_in.size(2), head_dim = sv_in.size(3);
  TORCH_CHECK(sv_in.scalar_type() == u_in.scalar_type(), kOp, ": sv must have the dtype of u, ", u_in.scalar_type(),
              ", not ", sv_in.scalar_type());
  TORCH_CHECK(rank == u_in.size(1), kOp, ": sv must have the rank of u, ", u_in.size(1), ", not ", rank);
  TORCH_CHECK(head_dim % 2 == 0, kOp, ": sv must have an even head_dim, not ", head_dim);
  const at::Tensor rows = int32_tensor(kOp, "rows", rows_in, {-1, kv_heads});
  const int64_t count = rows.size(0);
  const at::Tensor positions = int32_tensor(kOp, "positions", positions_in, {count, kv_heads});
  const at::Tensor selected_start = starts_tensor(kOp, "selected_start", selected_start_in, count);
  TORCH_CHECK(selected_start.size(0) - 1 == sv_in.size(0), kOp, ": selected_start must have shape [", sv_in.size(0) + 1,
              "] to fit sv, not ", selected_start.sizes());
  const at::Tensor cos = float32_tensor(kOp, "cos", cos_in, {-1, head_dim / 2});
  const at::Tensor sin = float32_tensor(kOp, "sin", sin_in, {cos.size(0), head_dim / 2});
  const at::Tensor u = u_in.contiguous(), sv = sv_in.contiguous();
  at::Tensor out = u.new_empty({count, kv_heads, head_dim});
  const int32_t *row = rows.const_data_ptr<int32_t>(), *position = positions.const_data_ptr<int32_t>();
  const int64_t found = check_selections(row, position, count * kv_heads, u.size(0), cos.size(0));
  if (found == 0 || head_dim == 0) return out;

  std::vector<Piece> pieces;
  const int32_t* start = selected_start.const_data_ptr<int32_t>();
  const int64_t piece_rows = std::max(kFewestPieceRows, count * kv_heads / (kPiecesPerThread * at::get_num_threads()));
  for (int64_t s = 0; s < sv.size(0); ++s)
    for (int64_t head = 0; head < kv_heads; ++head)
      for (int64_t begin = start[s]; begin < start[s + 1]; begin += piece_rows)
        pieces.push_back({s, head, begin, std::min<int64_t>(start[s + 1], begin + piece_rows)});
  const auto rebuild_keys = key_kernel();
  const int64_t key_bytes = head_dim * out.element_size();
  char* keys = static_cast<char*>(out.mutable_data_ptr());
  dynamic_for(pieces.size(), 1 + found * head_dim * rank / kProductsPerThread, [&](int64_t i) {
    thread_local Workspace workspace;
    thread_local std::vector<RebuiltKey> wanted;
    const Piece& piece = pieces[i];
    const KeyFactors factors{
        .u = u.const_data_ptr(),
        .sv = static_cast<const char*>(sv.const_data_ptr()) +
            (piece.sequence * kv_heads + piece.head) * rank * key_bytes,
        .bf16 = u.scalar_type() == at::kBFloat16,
        .cos = cos.const_data_ptr<float>(),
        .sin = sin.const_data_ptr<float>(),
        .rank = rank,
        .head_dim = head_dim,
    };
    wanted.clear();
    for (int64_t index = piece.begin * kv_heads + piece.head; index < piece.end * kv_heads; index += kv_heads)
      if (row[index] >= 0) wanted.push_back({row[index], position[index], keys + index * key_bytes, nullptr, nullptr});
    float* scratch =
        reinterpret_cast<float*>(workspace.get(reconstruct_scratch(rank, head_dim) * sizeof(float)));
    rebuild_keys(factors, wanted.data(), wanted.size(), scratch);
  });
  return out;
}

}  // namespace kvforge
