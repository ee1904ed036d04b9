// kvforge::chunk_cache_update on CPU: one pass over the places of each sequence and KV head.
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "native/checks.h"
#include "native/dynamic_for.h"

namespace kvforge {
namespace {

constexpr const char* kOp = "chunk_cache_update";
constexpr int64_t kPlacesPerThread = 1 << 13;  // that pay for waking a thread

// How many of selected [0, places) are chunks: they come first and ascend.
int64_t check_selected(const int32_t* selected, int64_t places) {
  int64_t count = 0;
  for (; count < places && selected[count] >= 0; ++count)
    TORCH_CHECK(count == 0 || selected[count - 1] < selected[count], kOp, ": selected holds chunk ", selected[count],
                " after chunk ", selected[count - 1], "; chunks must ascend");
  for (int64_t j = count; j < places; ++j)
    TORCH_CHECK(selected[j] < 0, kOp, ": selected holds chunk ", selected[j], " behind the last one");
  return count;
}

// One KV head: held, chunks and places have `places` elements; counts has two. in_place and is_free are scratch.
void update_head(const int32_t* selected, int64_t count, int32_t* held, int64_t* counts, int32_t* chunks,
                 int32_t* places_out, int64_t places, uint8_t* in_place, int32_t* free_places) {
  std::fill_n(in_place, count, 0);
  int64_t num_free = 0, hits = 0;
  for (int64_t j = 0; j < places; ++j) {
    // The first of selected that is not less, without a branch that depends on the chunk.
    const int32_t* first = selected;
    for (int64_t left = count; left > 0;) {
      const int64_t half = (left + 1) / 2;
      first += first[half - 1] < held[j] ? half : 0;
      left -= half;
    }
    const bool hit = held[j] >= 0 && first < selected + count && *first == held[j];
    if (hit) in_place[first - selected] = 1;
    free_places[num_free] = static_cast<int32_t>(j);
    num_free += !hit;
  }
  int64_t missed = 0;
  for (int64_t j = 0; j < count; ++j) {
    hits += in_place[j];
    if (in_place[j]) continue;
    chunks[missed] = selected[j];
    places_out[missed] = free_places[missed];
    held[free_places[missed]] = selected[j];
    ++missed;
  }
  std::fill(chunks + missed, chunks + places, -1);
  std::fill(places_out + missed, places_out + places, -1);
  counts[0] += count;
  counts[1] += hits;
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> chunk_cache_update(
    const at::Tensor& selected_in, at::Tensor& cached, at::Tensor& counts, const at::Tensor& slot_in) {
  check_dims(kOp, "selected", selected_in, 3);
  const int64_t sequences = selected_in.size(0), kv_heads = selected_in.size(1), places = selected_in.size(2);
  const at::Tensor selected = int32_tensor(kOp, "selected", selected_in, {sequences, kv_heads, places});
  check_tensor(kOp, "cached", cached, at::kInt, {-1, kv_heads, places});
  TORCH_CHECK(cached.is_contiguous(), kOp, ": cached must be contiguous");
  const int64_t num_slots = cached.size(0);
  TORCH_CHECK(counts.scalar_type() == at::kLong, kOp, ": counts must be int64, not ", counts.scalar_type());
  TORCH_CHECK(counts.sizes() == at::IntArrayRef({num_slots, kv_heads, 2}) && counts.is_contiguous(), kOp,
              ": counts must be contiguous of shape ", at::IntArrayRef({num_slots, kv_heads, 2}), ", not ",
              counts.sizes());
  const at::Tensor slot = int32_tensor(kOp, "slot", slot_in, {sequences});
  const int32_t *slots = slot.const_data_ptr<int32_t>(), *chosen = selected.const_data_ptr<int32_t>();
  std::vector<bool> taken(num_slots);
  std::vector<int64_t> num_chosen(sequences * kv_heads);
  for (int64_t s = 0; s < sequences; ++s) {
    if (slots[s] < 0) continue;
    TORCH_CHECK(slots[s] < num_slots, kOp, ": slot holds ", slots[s], " but cached has ", num_slots);
    TORCH_CHECK(!taken[slots[s]], kOp, ": slot holds ", slots[s], " twice");
    taken[slots[s]] = true;
    for (int64_t i = s * kv_heads; i < (s + 1) * kv_heads; ++i)
      num_chosen[i] = check_selected(chosen + i * places, places);
  }
  at::Tensor chunks = selected.new_empty(selected.sizes()), places_out = selected.new_empty(selected.sizes());
  int32_t *chunk = chunks.mutable_data_ptr<int32_t>(), *place = places_out.mutable_data_ptr<int32_t>();
  int32_t* held = cached.mutable_data_ptr<int32_t>();
  int64_t* count = counts.mutable_data_ptr<int64_t>();
  dynamic_for(sequences, 1 + sequences * kv_heads * places / kPlacesPerThread, [&](int64_t s) {
    const int64_t begin = s * kv_heads;
    if (slots[s] < 0) {
      std::fill_n(chunk + begin * places, kv_heads * places, -1);
      std::fill_n(place + begin * places, kv_heads * places, -1);
      return;
    }
    std::vector<uint8_t> in_place(places);
    std::vector<int32_t> free_places(places + 1);
    for (int64_t head = 0; head < kv_heads; ++head) {
      const int64_t i = begin + head, row = slots[s] * kv_heads + head;
      update_head(chosen + i * places, num_chosen[i], held + row * places, count + row * 2, chunk + i * places,
                  place + i * places, places, in_place.data(), free_places.data());
    }
  });
  return {chunks, places_out};
}

}  // namespace kvforge
