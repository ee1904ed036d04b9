// kvforge::selected_kv_write on CPU: checks, then keys are rebuilt and values copied together, over pieces of
// (sequence, KV head): memory that is far away is fetched while products are computed.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <vector>

#include "low_rank_key_reconstruct/cpu_kernel.h"
#include "native/checks.h"
#include "native/dynamic_for.h"
#include "native/workspace.h"

namespace kvforge {
namespace {

constexpr const char* kOp = "selected_kv_write";
constexpr int64_t kFewestPieceTokens = 192;  // each piece packs SV of its head
constexpr int64_t kPiecesPerThread = 8;
constexpr int64_t kProductsPerThread = 1 << 18;  // multiplications that pay for waking a thread

struct Pages {
  const char* name;
  const int32_t* pages;  // of one sequence
  int64_t width, page_size, num_pages;

  // The page of the chunk whose first token is `token`, and where in it that is. A chunk does not cross pages.
  std::pair<int64_t, int64_t> find(int64_t token) const {
    const int64_t page = pages[token / page_size];
    return {page, token % page_size};
  }

  void check(const char* what, int64_t index, int64_t chunk_size) const {
    TORCH_CHECK(index >= 0 && index < width * page_size / chunk_size, kOp, ": ", what, " holds ", index, " but ", name,
                " has room for ", width * page_size / chunk_size);
    const int64_t page = find(index * chunk_size).first;
    TORCH_CHECK(page >= 0 && page < num_pages, kOp, ": ", name, " holds page ", page, " of ", num_pages);
  }
};

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

struct Piece {
  int64_t sequence, head, begin, end;  // of its chunks
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
  TORCH_CHECK(chunk_size > 0 && page_size % chunk_size == 0, kOp, ": chunk_size must be positive and divide the page "
              "size, ", page_size, ", but is ", chunk_size);
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
    return Pages{"shadow_table", shadow_table.const_data_ptr<int32_t>() + s * shadow_table.size(1),
                 shadow_table.size(1), page_size, shadow_pages};
  };
  const auto cache = [&](int64_t s) {
    return Pages{"page_table", page_table.const_data_ptr<int32_t>() + s * page_table.size(1), page_table.size(1),
                 page_size, k_pool.size(0)};
  };
  std::vector<int64_t> brought(sequences * kv_heads);
  int64_t total = 0;
  for (int64_t s = 0; s < sequences; ++s) {
    if (slots[s] < 0) continue;
    TORCH_CHECK(slots[s] < num_slots, kOp, ": slot holds ", slots[s], " but sv has ", num_slots);
    for (int64_t i = s * kv_heads; i < (s + 1) * kv_heads; ++i) {
      int64_t& count = brought[i];
      for (; count < places_each && chunks[i * places_each + count] >= 0; ++count) {
        const int64_t chunk = chunks[i * places_each + count];
        shadow(s).check("chunks", chunk, chunk_size);
        TORCH_CHECK((chunk + 1) * chunk_size <= cos.size(0), kOp, ": chunks holds ", chunk, " but cos and sin have ",
                    cos.size(0), " positions");
        cache(s).check("places", places[i * places_each + count], chunk_size);
      }
      total += count * chunk_size;
    }
  }
  if (total == 0 || head_dim == 0) return;

  const at::Tensor u = u_in.contiguous(), sv = sv_in.contiguous();
  const int64_t tokens = std::max(kFewestPieceTokens, total / (kPiecesPerThread * at::get_num_threads()));
  const int64_t piece_chunks = (tokens + chunk_size - 1) / chunk_size;
  std::vector<Piece> pieces;
  for (int64_t i = 0; i < sequences * kv_heads; ++i)
    for (int64_t begin = 0; begin < brought[i]; begin += piece_chunks)
      pieces.push_back({i / kv_heads, i % kv_heads, begin, std::min(brought[i], begin + piece_chunks)});
  const Pool keys(k_pool), values(v_pool), host(host_v);
  const auto rebuild_keys = key_kernel();
  dynamic_for(pieces.size(), 1 + total * head_dim * rank / kProductsPerThread, [&](int64_t i) {
    thread_local Workspace workspace;
    thread_local std::vector<RebuiltKey> wanted;
    const auto [s, head, begin, end] = pieces[i];
    const Pages from = shadow(s), to = cache(s);
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
