// kvforge::selected_kv_write on CPU: checks, then keys are rebuilt and values copied together, over pieces of
// (sequence, KV head): memory that is far away is fetched while products are computed.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <numeric>
#include <utility>
#include <vector>

#include "low_rank_key_reconstruct/cpu_kernel.h"
#include "low_rank_key_reconstruct/cpu_lists.h"
#include "native/checks.h"
#include "native/dynamic_for.h"
#include "native/workspace.h"

namespace kvforge {
namespace {

constexpr const char* kOp = "selected_kv_write";
constexpr int64_t kFewestPieceTokens = 192;

struct Pool {
  char* data;
  int64_t page_stride, slot_stride, head_stride;  // in bytes

  explicit Pool(const at::Tensor& t)
      : data(static_cast<char*>(const_cast<void*>(t.const_data_ptr()))),
        page_stride(t.stride(0) * t.element_size()),
        slot_stride(t.stride(1) * t.element_size()),
        head_stride(t.stride(2) * t.element_size()) {}

  char* at(std::pair<int64_t, int64_t> slot, int64_t head) const {
    return data + slot.first * page_stride + slot.second * slot_stride + head * head_stride;
  }
};

}  // namespace

void selected_kv_write(
    const at::Tensor& u_in, const at::Tensor& sv_in, const at::Tensor& host_v, const at::Tensor& slot_in,
    const at::Tensor& chunks_in, const at::Tensor& places_in, const at::Tensor& shadow_table_in,
    const at::Tensor& page_table_in, const at::Tensor& cos_in, const at::Tensor& sin_in, int64_t chunk_size,
    at::Tensor& k_pool, at::Tensor& v_pool) {
  check_pools(kOp, k_pool, v_pool);
  check_float(kOp, "k_pool", k_pool, 4);
  const int64_t page_size = k_pool.size(1), kv_heads = k_pool.size(2), head_dim = k_pool.size(3);
  check_float(kOp, "u", u_in, 3);
  check_float(kOp, "sv", sv_in, 4);
  check_float(kOp, "host_v", host_v, 4);
  const auto check_dtype = [&](const char* name, const at::Tensor& t) {
    TORCH_CHECK(t.scalar_type() == k_pool.scalar_type(), kOp, ": ", name, " must have the dtype of the pools, ",
                k_pool.scalar_type(), ", not ", t.scalar_type());
  };
  check_dtype("u", u_in);
  check_dtype("sv", sv_in);
  check_dtype("host_v", host_v);
  const int64_t shadow_pages = u_in.size(0), rank = u_in.size(2), num_slots = sv_in.size(0);
  TORCH_CHECK(u_in.size(1) == page_size, kOp, ": u must have the page size of the pools, ", page_size, ", not ",
              u_in.size(1));
  const auto check_shape = [&](const char* name, const at::Tensor& t, at::IntArrayRef shape) {
    TORCH_CHECK(t.sizes() == shape, kOp, ": ", name, " must be ", shape, " to fit u and the pools, not ", t.sizes());
  };
  check_shape("sv", sv_in, {num_slots, kv_heads, rank, head_dim});
  check_shape("host_v", host_v, {shadow_pages, page_size, kv_heads, head_dim});
  TORCH_CHECK(host_v.stride(3) == 1, kOp, ": host_v must be contiguous in its last dimension");
  TORCH_CHECK(head_dim % 2 == 0, kOp, ": k_pool must have an even head_dim, not ", head_dim);
  check_chunk_size(kOp, chunk_size, page_size);
  check_dims(kOp, "chunks", chunks_in, 3);
  const int64_t sequences = chunks_in.size(0), places_each = chunks_in.size(2);
  const at::Tensor chunks_tensor = int32_tensor(kOp, "chunks", chunks_in, {sequences, kv_heads, places_each});
  const at::Tensor places_tensor = int32_tensor(kOp, "places", places_in, {sequences, kv_heads, places_each});
  const at::Tensor slot = int32_tensor(kOp, "slot", slot_in, {sequences});
  const at::Tensor shadow_table = int32_tensor(kOp, "shadow_table", shadow_table_in, {sequences, -1});
  const at::Tensor page_table = int32_tensor(kOp, "page_table", page_table_in, {sequences, -1});
  const at::Tensor cos = float32_tensor(kOp, "cos", cos_in, {-1, head_dim / 2});
  const at::Tensor sin = float32_tensor(kOp, "sin", sin_in, {cos.size(0), head_dim / 2});

  const int32_t *chunks = chunks_tensor.const_data_ptr<int32_t>(), *places = places_tensor.const_data_ptr<int32_t>();
  const int32_t* slots = slot.const_data_ptr<int32_t>();
  const auto shadow = [&](int64_t s) {
    return ChunkPages(kOp, "shadow_table", shadow_table, s, page_size, shadow_pages);
  };
  const auto cache = [&](int64_t s) {
    return ChunkPages(kOp, "page_table", page_table, s, page_size, k_pool.size(0));
  };
  const std::vector<int64_t> counts =
      check_lists(kOp, chunks_tensor, slot, num_slots, cos.size(0), chunk_size, shadow,
                  [&](int64_t s, int64_t i) { cache(s).check("places", places[i], chunk_size); });
  const int64_t total = std::accumulate(counts.begin(), counts.end(), int64_t{0}) * chunk_size;
  if (total == 0 || head_dim == 0) return;

  const at::Tensor u = u_in.contiguous(), sv = sv_in.contiguous();
  const std::vector<ListPiece> pieces =
      pieces_of_lists(counts, kv_heads, chunk_size, kFewestPieceTokens, total, at::get_num_threads());
  const Pool keys(k_pool), values(v_pool), host(host_v);
  const auto rebuild_keys = key_kernel();
  dynamic_for(pieces.size(), 1 + total * head_dim * rank / kProductsPerThread, [&](int64_t i) {
    thread_local Workspace workspace;
    thread_local std::vector<RebuiltKey> wanted;
    const auto [s, head, begin, end] = pieces[i];
    const ChunkPages from = shadow(s), to = cache(s);
    const int64_t first = (s * kv_heads + head) * places_each;
    wanted.clear();
    for (int64_t j = first + begin; j < first + end; ++j) {
      const auto source = from.find(chunks[j] * chunk_size), target = to.find(places[j] * chunk_size);
      for (int64_t t = 0; t < chunk_size; ++t) {
        const std::pair row{source.first, source.second + t}, place{target.first, target.second + t};
        wanted.push_back({row.first * page_size + row.second, chunks[j] * chunk_size + t, keys.at(place, head),
                          host.at(row, head), values.at(place, head)});
      }
    }
    const KeyFactors factors{
        .u = u.const_data_ptr(),
        .sv = static_cast<const char*>(sv.const_data_ptr()) +
            (slots[s] * kv_heads + head) * rank * head_dim * sv.element_size(),
        .bf16 = sv.scalar_type() == at::kBFloat16,
        .cos = cos.const_data_ptr<float>(),
        .sin = sin.const_data_ptr<float>(),
        .rank = rank,
        .head_dim = head_dim,
    };
    float* scratch = reinterpret_cast<float*>(workspace.get(reconstruct_scratch(rank, head_dim) * sizeof(float)));
    rebuild_keys(factors, wanted.data(), wanted.size(), scratch);
  });
}

}  // namespace kvforge
