// kvforge::attention_mass on CPU: checks, then the kernels over blocks of queries and over blocks of slots.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include "attention_mass/cpu_kernel.h"
#include "native/checks.h"
#include "native/dynamic_for.h"
#include "native/isa.h"
#include "native/workspace.h"

namespace kvforge {
namespace {

constexpr const char* kOp = "attention_mass";
constexpr int64_t kLogits = 96 << 10;           // floats that a block of queries may take
constexpr int64_t kMaxBlock = 16;               // queries of a block
constexpr int64_t kBatchBytes = 64ll << 20;     // weights and packed keys that are held at once
constexpr int64_t kSlotsAtOnce = 256;           // that a thread packs or adds to
constexpr int64_t kItemsPerThread = 2;
constexpr int64_t kProductsPerThread = 1 << 19;  // of logits, that pay for waking a thread

struct Kernels {
  decltype(&isa_portable::mass_strip_bytes) strip_bytes;
  decltype(&isa_portable::mass_scratch_bytes) scratch_bytes;
  decltype(&isa_portable::pack_mass_keys) pack;
  decltype(&isa_portable::weigh) weigh;
  decltype(&isa_portable::add_weights) add;
};

#define KVFORGE_KERNELS(isa) \
  { &isa::mass_strip_bytes, &isa::mass_scratch_bytes, &isa::pack_mass_keys, &isa::weigh, &isa::add_weights }
Kernels kernels() {
#if defined(__x86_64__)
  switch (current_isa()) {
    case Isa::avx512_bf16: return KVFORGE_KERNELS(isa_avx512_bf16);
    case Isa::avx512_vnni:
    case Isa::avx512: return KVFORGE_KERNELS(isa_avx512);
    case Isa::avx2: return KVFORGE_KERNELS(isa_avx2);
    case Isa::portable: break;
  }
#endif
  return KVFORGE_KERNELS(isa_portable);
}
#undef KVFORGE_KERNELS

int64_t blocks_of(int64_t count, int64_t block) { return (count + block - 1) / block; }

// Queries whose weights are held at once, and the order of their additions: a sequence and KV head is there once.
struct Batch {
  std::vector<MassQueries> queries;
  int64_t bytes = 0;
  int64_t products = 0;
};

class Runner {
 public:
  explicit Runner(const AttentionMass& args) : args_(args), run_(kernels()), strip_bytes_(run_.strip_bytes(args)) {}

  // All observed queries of a sequence under one KV head.
  void add(MassQueries all) {
    all.width = blocks_of(all.first_visible + all.count - 1, kMassBlock) * kMassBlock;
    const int64_t row_bytes = all.width * static_cast<int64_t>(sizeof(float));
    const int64_t most = std::max<int64_t>(1, kBatchBytes / row_bytes), end = all.count;
    for (int64_t begin = 0; begin < end; begin += most) {
      MassQueries part = all;
      part.first_token += begin;
      part.first_visible += begin;
      part.count = std::min(most, end - begin);
      if (begin > 0) part.scored = part.length;  // the first part has begun all slots
      const int64_t bytes = part.count * row_bytes + (is_alone(part) ? 0 : packed_bytes(part));
      if (begin > 0 || batch_.bytes + bytes > kBatchBytes) flush();
      batch_.bytes += bytes;
      batch_.products += part.count * args_.group * part.width * args_.head_dim;
      batch_.queries.push_back(part);
    }
  }

  void flush() {
    if (!batch_.queries.empty()) run();
    batch_ = {};
  }

 private:
  struct Item {  // queries or slots [begin, end) under one KV head, or under the next num_heads of a sequence
    int64_t queries, begin, end, num_heads = 1;
  };

  int64_t block(const MassQueries& x) const {
    return std::clamp<int64_t>(kLogits / (args_.group * x.width), 1, kMaxBlock);
  }

  // Whether one block has all queries: their keys are packed on the way and their weights added at once.
  bool is_alone(const MassQueries& x) const { return x.count <= block(x); }

  int64_t packed_bytes(const MassQueries& x) const { return x.width / kMassStrip * strip_bytes_; }

  // The KV heads of each sequence, together where that leaves enough items for the threads and logits in the cache.
  void add_alone(std::vector<Item>& alone, int64_t i, int64_t threads) const {
    const MassQueries& x = batch_.queries[i];
    if (!alone.empty()) {
      Item& last = alone.back();
      const int64_t num_heads = last.num_heads + 1;
      if (last.queries + last.num_heads == i && batch_.queries[last.queries].first_token == x.first_token &&
          num_heads * static_cast<int64_t>(threads) * kItemsPerThread <= static_cast<int64_t>(batch_.queries.size()) &&
          num_heads * x.count * args_.group * x.width <= kLogits) {
        last.num_heads = num_heads;
        return;
      }
    }
    alone.push_back({i, 0, x.count});
  }

  void run() {
    thread_local Workspace shared;
    char* free = shared.get(batch_.bytes);
    std::vector<Item> packs, weighed, added, alone;
    int64_t scratch_bytes = 0;
    const int64_t threads = std::min<int64_t>(at::get_num_threads(), 1 + batch_.products / kProductsPerThread);
    const int64_t count = static_cast<int64_t>(batch_.queries.size());
    const auto add_scratch = [&](int64_t queries, int64_t width) {
      scratch_bytes = std::max(scratch_bytes, run_.scratch_bytes(args_, queries, width));
    };
    for (int64_t i = 0; i < count; ++i) {
      MassQueries& x = batch_.queries[i];
      x.weights = reinterpret_cast<float*>(free);
      free += x.count * x.width * sizeof(float);
      if (is_alone(x)) {
        add_alone(alone, i, threads);
        add_scratch(alone.back().num_heads * x.count, x.width);
        continue;
      }
      add_scratch(block(x), x.width);
      x.packed = free;
      free += packed_bytes(x);
      for (int64_t slot = 0; slot < x.length; slot += kSlotsAtOnce) {
        packs.push_back({i, slot, std::min(slot + kSlotsAtOnce, x.width)});
        added.push_back(packs.back());
      }
      // The last queries see the most slots: they are begun first.
      for (int64_t end = x.count; end > 0; end -= block(x))
        weighed.push_back({i, std::max<int64_t>(0, end - block(x)), end});
    }
    const auto weigh = [&](const Item& item) {
      thread_local Workspace scratch;
      run_.weigh(args_, &batch_.queries[item.queries], item.num_heads, item.begin, item.end, scratch.get(scratch_bytes));
    };
    dynamic_for(packs.size(), threads, [&](int64_t i) {
      run_.pack(args_, batch_.queries[packs[i].queries], packs[i].begin, packs[i].end);
    });
    dynamic_for(weighed.size(), threads, [&](int64_t i) { weigh(weighed[i]); });
    dynamic_for(added.size(), threads, [&](int64_t i) {
      run_.add(args_, batch_.queries[added[i].queries], added[i].begin, added[i].end);
    });
    dynamic_for(alone.size(), threads, [&](int64_t i) {
      weigh(alone[i]);
      for (int64_t x = alone[i].queries; x < alone[i].queries + alone[i].num_heads; ++x)
        run_.add(args_, batch_.queries[x], 0, batch_.queries[x].width);
    });
  }

  const AttentionMass& args_;
  const Kernels run_;
  const int64_t strip_bytes_;
  Batch batch_;
};

MassTensor paged(const at::Tensor& t) { return {t.data_ptr(), t.stride(0), t.stride(1), t.stride(2)}; }

MassTensor paged(const std::optional<at::Tensor>& t) { return t.has_value() ? paged(*t) : MassTensor{}; }

// The pages of so many slots.
void check_pages(const char* name, const char* of, const int32_t* pages, int64_t columns, int64_t page_size,
                 int64_t length, int64_t sequence, int64_t num_pages) {
  TORCH_CHECK(length <= columns * page_size, kOp, ": ", name, " has ", columns, " pages of ", page_size,
              " for a sequence, fewer than the ", length, " slots of sequence ", sequence, " need");
  for (int64_t i = 0; i * page_size < length; ++i)
    TORCH_CHECK(pages[i] >= 0 && pages[i] < num_pages, kOp, ": ", name, " of sequence ", sequence, " names page ",
                pages[i], " but ", of, " has ", num_pages);
}

}  // namespace

void attention_mass(
    const at::Tensor& q_in, const at::Tensor& k_pool, const at::Tensor& query_start_in,
    const at::Tensor& kv_length_in, const at::Tensor& page_table_in, const at::Tensor& state_table_in,
    const at::Tensor& skipped_in, const at::Tensor& scored_in, double scale, int64_t kind, at::Tensor& mass,
    const std::optional<at::Tensor>& squares, const std::optional<at::Tensor>& k_scales, double k_scale) {
  check_float(kOp, "q", q_in, 3);
  check_pools(kOp, k_pool, k_pool);
  check_scales(kOp, k_pool, k_scales, k_scales, k_scale, k_scale);
  const int64_t heads = q_in.size(1), head_dim = q_in.size(2);
  const int64_t page_size = k_pool.size(1), kv_heads = k_pool.size(2);
  TORCH_CHECK(head_dim == k_pool.size(3) && head_dim > 0, kOp, ": q must have the head_dim of k_pool, ",
              k_pool.size(3), ", not ", head_dim);
  TORCH_CHECK(kv_heads > 0 && heads > 0 && heads % kv_heads == 0, kOp, ": q must have a multiple of the ", kv_heads,
              " KV heads of k_pool, not ", heads);
  TORCH_CHECK(page_size > 0, kOp, ": k_pool must have at least one slot in a page");
  TORCH_CHECK(std::isfinite(scale), kOp, ": scale must be finite");
  TORCH_CHECK(kind >= 0 && kind <= 3, kOp,
              ": kind must be 0 (sum), 1 (sum and squares), 2 (count below the mean) or 3 (maximum), not ", kind);
  TORCH_CHECK(squares.has_value() || kind != 1, kOp, ": squares must be given with kind 1");
  TORCH_CHECK(!squares.has_value() || kind == 1, kOp, ": squares go with kind 1, not with kind ", kind);
  check_tensor(kOp, "mass", mass, at::kFloat, {-1, page_size, kv_heads});
  if (squares.has_value()) check_tensor(kOp, "squares", *squares, at::kFloat, mass.sizes());
  const at::Tensor query_start = starts_tensor(kOp, "query_start", query_start_in, q_in.size(0));
  const int64_t sequences = query_start.size(0) - 1;
  const at::Tensor kv_length = int32_tensor(kOp, "kv_length", kv_length_in, {sequences});
  const at::Tensor page_table = int32_tensor(kOp, "page_table", page_table_in, {sequences, -1});
  const at::Tensor state_table = int32_tensor(kOp, "state_table", state_table_in, {sequences, -1});
  const at::Tensor skipped = int32_tensor(kOp, "skipped", skipped_in, {sequences});
  const at::Tensor scored = int32_tensor(kOp, "scored", scored_in, {sequences});
  TORCH_CHECK(state_table.size(1) > 0 || sequences == 0, kOp, ": state_table must have at least one column");

  std::vector<MassQueries> found;
  for (int64_t s = 0; s < sequences; ++s) {
    const int32_t* start = query_start.const_data_ptr<int32_t>() + s;
    const int64_t length = kv_length.const_data_ptr<int32_t>()[s], queries = start[1] - start[0];
    const int64_t left_out = skipped.const_data_ptr<int32_t>()[s], known = scored.const_data_ptr<int32_t>()[s];
    const int32_t* pages = page_table.const_data_ptr<int32_t>() + s * page_table.size(1);
    const int32_t* state_pages = state_table.const_data_ptr<int32_t>() + s * state_table.size(1);
    TORCH_CHECK(left_out >= 0, kOp, ": skipped must not be negative, but is ", left_out, " for sequence ", s);
    TORCH_CHECK(known >= 0, kOp, ": scored must not be negative, but is ", known, " for sequence ", s);
    if (left_out >= queries || state_pages[0] < 0) continue;
    TORCH_CHECK(length >= queries, kOp, ": kv_length of sequence ", s, " is ", length, ", less than its ", queries,
                " queries");
    check_pages("page_table", "k_pool", pages, page_table.size(1), page_size, length, s, k_pool.size(0));
    check_pages("state_table", "mass", state_pages, state_table.size(1), page_size, length, s, mass.size(0));
    found.push_back({
        .pages = pages,
        .state_pages = state_pages,
        .length = length,
        .scored = known,
        .first_token = start[0] + left_out,
        .first_visible = length - queries + left_out + 1,
        .count = queries - left_out,
    });
  }
  const at::Tensor q = q_in.stride(2) == 1 ? q_in : q_in.contiguous();
  const AttentionMass args{
      .q = q.const_data_ptr(),
      .q_bf16 = q.scalar_type() == at::kBFloat16,
      .pool = dtype(k_pool),
      .q_token_stride = q.stride(0),
      .q_head_stride = q.stride(1),
      .k = paged(k_pool),
      .k_scales = paged(k_scales),
      .scale = static_cast<float>(scale) * static_cast<float>(k_scale),
      .group = heads / kv_heads,
      .head_dim = head_dim,
      .page_size = page_size,
      .kind = kind,
      .mass = paged(mass),
      .squares = paged(squares),
  };
  Runner runner(args);
  for (MassQueries queries : found)
    for (queries.kv_head = 0; queries.kv_head < kv_heads; ++queries.kv_head) runner.add(queries);
  runner.flush();
}

}  // namespace kvforge
