// kvforge::chunk_cache_update on CPU: one pass over the places of each sequence and KV head.
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "native/checks.h"
#include "native/dynamic_for.h"
#include "native/operators.h"

namespace kvforge {
namespace {

constexpr const char* kOp = "chunk_cache_update";
constexpr int64_t kTokensPerThread = 1 << 14;  // that pay for waking a thread

struct Pages {
  const char* name;
  const int32_t* pages;  // of one sequence
  int64_t count, page_size;

  int32_t slot(int64_t position) const {
    const int64_t page = pages[position / page_size], slot = page * page_size + position % page_size;
    TORCH_CHECK(page >= 0 && slot <= std::numeric_limits<int32_t>::max(), kOp, ": ", name, " holds page ", page);
    return static_cast<int32_t>(slot);
  }
};

struct Update {
  const int32_t* selected;  // [kv_heads, places] of one sequence
  const int32_t* held;      // likewise, what the places hold
  int32_t* holding;         // likewise, what they will hold
  int32_t *rows, *positions, *targets;  // [places, chunk_size, kv_heads], filled with -1
  Pages shadow, cache;
  int64_t kv_heads, places, chunk_size;
};

// `mark` has a 0 for every chunk of the sequence, and has it again afterwards.
void update_head(const Update& a, int64_t head, std::vector<uint8_t>& mark) {
  constexpr uint8_t kWanted = 1, kHeld = 2;
  const int32_t *selected = a.selected + head * a.places, *held = a.held + head * a.places;
  int32_t* holding = a.holding + head * a.places;
  const int64_t chunks = mark.size();
  for (int64_t j = 0; j < a.places; ++j) {
    TORCH_CHECK(selected[j] < chunks, kOp, ": selected holds chunk ", selected[j], " but shadow_table has room for ",
                chunks);
    if (selected[j] >= 0) mark[selected[j]] = kWanted;
  }
  const auto is_hit = [&](int32_t chunk) { return chunk >= 0 && chunk < chunks && mark[chunk] != 0; };
  for (int64_t j = 0; j < a.places; ++j) {
    holding[j] = held[j];
    if (is_hit(held[j])) mark[held[j]] |= kHeld;
  }
  int64_t place = 0;
  for (int64_t j = 0; j < a.places; ++j) {
    const int64_t chunk = selected[j];
    if (chunk < 0 || mark[chunk] & kHeld) continue;
    while (place < a.places && is_hit(held[place])) ++place;
    if (place == a.places) break;
    holding[place] = static_cast<int32_t>(chunk);
    TORCH_CHECK((place + 1) * a.chunk_size <= a.cache.count * a.cache.page_size, kOp,
                ": page_table has no page for place ", place);
    for (int64_t i = 0; i < a.chunk_size; ++i) {
      const int64_t token = place * a.chunk_size + i, out = token * a.kv_heads + head;
      a.rows[out] = a.shadow.slot(chunk * a.chunk_size + i);
      a.positions[out] = static_cast<int32_t>(chunk * a.chunk_size + i);
      a.targets[out] = a.cache.slot(token);
    }
    ++place;
  }
  for (int64_t j = 0; j < a.places; ++j)
    if (selected[j] >= 0) mark[selected[j]] = 0;
}

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor> chunk_cache_update(
    const at::Tensor& selected_in, at::Tensor& cached, const at::Tensor& slot_in, const at::Tensor& shadow_table_in,
    const at::Tensor& page_table_in, int64_t chunk_size, int64_t page_size) {
  check_dims(kOp, "selected", selected_in, 3);
  const int64_t sequences = selected_in.size(0), kv_heads = selected_in.size(1), places = selected_in.size(2);
  const at::Tensor selected = int32_tensor(kOp, "selected", selected_in, {sequences, kv_heads, places});
  check_tensor(kOp, "cached", cached, at::kInt, {-1, kv_heads, places});
  TORCH_CHECK(cached.is_contiguous(), kOp, ": cached must be contiguous");
  const at::Tensor slot = int32_tensor(kOp, "slot", slot_in, {sequences});
  const at::Tensor shadow_table = int32_tensor(kOp, "shadow_table", shadow_table_in, {sequences, -1});
  const at::Tensor page_table = int32_tensor(kOp, "page_table", page_table_in, {sequences, -1});
  TORCH_CHECK(chunk_size > 0, kOp, ": chunk_size must be positive, not ", chunk_size);
  TORCH_CHECK(page_size > 0, kOp, ": page_size must be positive, not ", page_size);
  const int32_t* slots = slot.const_data_ptr<int32_t>();
  std::vector<int64_t> active;
  std::vector<bool> taken(cached.size(0));
  for (int64_t s = 0; s < sequences; ++s) {
    if (slots[s] < 0) continue;
    TORCH_CHECK(slots[s] < cached.size(0), kOp, ": slot holds ", slots[s], " but cached has ", cached.size(0));
    TORCH_CHECK(!taken[slots[s]], kOp, ": slot holds ", slots[s], " twice");
    taken[slots[s]] = true;
    active.push_back(s);
  }
  const int64_t tokens = places * chunk_size;
  at::Tensor results[3];
  for (at::Tensor& result : results) {
    result = selected.new_empty({sequences * tokens, kv_heads});
    std::fill_n(result.mutable_data_ptr<int32_t>(), result.numel(), -1);
  }
  const int64_t size = kv_heads * places, count = active.size();
  const at::Tensor holding = selected.new_empty({count, size});
  int32_t *held = cached.mutable_data_ptr<int32_t>(), *updated = holding.mutable_data_ptr<int32_t>();
  dynamic_for(count, 1 + count * tokens * kv_heads / kTokensPerThread, [&](int64_t i) {
    const int64_t s = active[i], begin = s * tokens * kv_heads;
    const Update update{
        .selected = selected.const_data_ptr<int32_t>() + s * size,
        .held = held + slots[s] * size,
        .holding = updated + i * size,
        .rows = results[0].mutable_data_ptr<int32_t>() + begin,
        .positions = results[1].mutable_data_ptr<int32_t>() + begin,
        .targets = results[2].mutable_data_ptr<int32_t>() + begin,
        .shadow = {"shadow_table", shadow_table.const_data_ptr<int32_t>() + s * shadow_table.size(1),
                   shadow_table.size(1), page_size},
        .cache = {"page_table", page_table.const_data_ptr<int32_t>() + s * page_table.size(1), page_table.size(1),
                  page_size},
        .kv_heads = kv_heads,
        .places = places,
        .chunk_size = chunk_size,
    };
    std::vector<uint8_t> mark(update.shadow.count * page_size / chunk_size);
    for (int64_t head = 0; head < kv_heads; ++head) update_head(update, head, mark);
  });
  for (int64_t i = 0; i < count; ++i) std::copy_n(updated + i * size, size, held + slots[active[i]] * size);
  return {results[0], results[1], results[2]};
}

}  // namespace kvforge
