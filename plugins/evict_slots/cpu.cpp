// kvforge::evict_slots on CPU: per lane (sequence and KV head) the victims are found by the integers that order like the
// scores; positions are looked up among equal scores alone.
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "native/cast.h"
#include "native/checks.h"
#include "native/dynamic_for.h"

namespace kvforge {
namespace {

constexpr const char* kOp = "evict_slots";
constexpr int64_t kSlotsPerThread = 1 << 14;  // looked at or moved, that pay for waking a thread
constexpr int64_t kFewVictims = 16;           // found in one pass with a heap

// What has a row of `bytes` bytes for each page, offset and KV head.
struct Rows {
  char* data;
  int64_t page_stride, slot_stride, head_stride, bytes;

  explicit Rows(const at::Tensor& t)
      : data(static_cast<char*>(const_cast<void*>(t.const_data_ptr()))),
        page_stride(t.stride(0) * t.element_size()),
        slot_stride(t.stride(1) * t.element_size()),
        head_stride(t.stride(2) * t.element_size()),
        bytes(t.element_size() * (t.dim() == 4 ? t.size(3) : 1)) {}

  char* at(int64_t page, int64_t offset, int64_t head) const {
    return data + page * page_stride + offset * slot_stride + head * head_stride;
  }
};

// Where the slots of one sequence are.
struct Pages {
  const int32_t* pages;
  int64_t page_size;

  char* row(const Rows& rows, int64_t slot, int64_t head) const {
    return rows.at(pages[slot / page_size], slot % page_size, head);
  }
  void move(const Rows& rows, int64_t from, int64_t to, int64_t head) const {
    std::memcpy(row(rows, to, head), row(rows, from, head), rows.bytes);
  }
};

// Orders like the floats, zeros equal, not a number like -inf.
inline int32_t ordered(float x) {
  const float number = x == x ? x + 0.0f : -std::numeric_limits<float>::infinity();
  const int32_t bits = static_cast<int32_t>(to_bits(number));
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

struct Scratch {
  std::vector<int32_t> keys, sorted;
  std::vector<std::pair<int32_t, int32_t>> equals;  // position, slot
  std::vector<int32_t> victims;                     // ascending
};

// The count-th smallest of keys [n], 0 < count <= n.
int32_t bound_of(const int32_t* keys, int64_t n, int64_t count, std::vector<int32_t>& sorted) {
  if (count == 1) {
    int32_t least = keys[0];
    for (int64_t i = 1; i < n; ++i) least = keys[i] < least ? keys[i] : least;
    return least;
  }
  if (count <= kFewVictims) {
    sorted.resize(count);
    std::partial_sort_copy(keys, keys + n, sorted.begin(), sorted.end());
  } else {
    sorted.assign(keys, keys + n);
    std::nth_element(sorted.begin(), sorted.begin() + count - 1, sorted.end());
  }
  return sorted[count - 1];
}

// The `count` slots of scores [n] with the smallest (score, position), into scratch.victims.
template <typename Position>
void find_victims(const float* scores, int64_t n, int64_t count, const Position& position, Scratch& scratch) {
  scratch.victims.clear();
  if (count == 0) return;
  scratch.keys.resize(n);
  int32_t* keys = scratch.keys.data();
  for (int64_t i = 0; i < n; ++i) keys[i] = ordered(scores[i]);
  const int32_t bound = bound_of(keys, n, count, scratch.sorted);
  scratch.equals.clear();
  for (int64_t i = 0; i < n; ++i) {
    if (keys[i] > bound) continue;
    if (keys[i] < bound)
      scratch.victims.push_back(static_cast<int32_t>(i));
    else
      scratch.equals.emplace_back(0, static_cast<int32_t>(i));
  }
  const int64_t wanted = count - static_cast<int64_t>(scratch.victims.size());
  if (wanted < static_cast<int64_t>(scratch.equals.size())) {
    for (auto& [place, slot] : scratch.equals) place = position(slot);
    std::nth_element(scratch.equals.begin(), scratch.equals.begin() + wanted, scratch.equals.end());
  }
  for (int64_t j = 0; j < wanted; ++j) scratch.victims.push_back(scratch.equals[j].second);
  std::sort(scratch.victims.begin(), scratch.victims.end());
}

}  // namespace

void evict_slots(
    const at::Tensor& score_in, const at::Tensor& keep_in, const at::Tensor& kv_length_in, const at::Tensor& sealed_in,
    const at::Tensor& shift_in, const at::Tensor& page_table_in, const at::Tensor& state_table_in,
    at::Tensor& position, at::Tensor& k_pool, at::Tensor& v_pool, const std::optional<at::Tensor>& k_scales,
    const std::optional<at::Tensor>& v_scales, const std::optional<at::Tensor>& mass,
    const std::optional<at::Tensor>& squares) {
  check_pools(kOp, k_pool, v_pool);
  check_scales(kOp, k_pool, k_scales, v_scales, 1.0, 1.0);
  const int64_t page_size = k_pool.size(1), kv_heads = k_pool.size(2);
  check_dims(kOp, "score", score_in, 3);
  const int64_t sequences = score_in.size(0), most = score_in.size(2);
  const at::Tensor score = float32_tensor(kOp, "score", score_in, {sequences, kv_heads, most});
  const at::Tensor keep = int32_tensor(kOp, "keep", keep_in, {sequences});
  const at::Tensor kv_length = int32_tensor(kOp, "kv_length", kv_length_in, {sequences});
  const at::Tensor sealed = int32_tensor(kOp, "sealed", sealed_in, {sequences});
  const at::Tensor shift = int32_tensor(kOp, "shift", shift_in, {sequences});
  const at::Tensor page_table = int32_tensor(kOp, "page_table", page_table_in, {sequences, -1});
  const at::Tensor state_table = int32_tensor(kOp, "state_table", state_table_in, {sequences, -1});
  check_tensor(kOp, "position", position, at::kInt, {-1, page_size, kv_heads});
  std::vector<Rows> pools{Rows(k_pool), Rows(v_pool)}, statistics;
  if (k_scales.has_value()) {
    pools.emplace_back(*k_scales);
    pools.emplace_back(*v_scales);
  }
  for (const auto& [name, tensor] : {std::pair("mass", &mass), std::pair("squares", &squares)}) {
    if (!tensor->has_value()) continue;
    check_tensor(kOp, name, **tensor, at::kFloat, position.sizes());
    statistics.emplace_back(**tensor);
  }

  const int32_t *keeps = keep.const_data_ptr<int32_t>(), *lengths = kv_length.const_data_ptr<int32_t>();
  const int32_t *seals = sealed.const_data_ptr<int32_t>(), *shifts = shift.const_data_ptr<int32_t>();
  const auto pages_of = [&](const at::Tensor& table, int64_t s) {
    return Pages{table.const_data_ptr<int32_t>() + s * table.size(1), page_size};
  };
  const auto check_pages = [&](const char* name, const at::Tensor& table, int64_t s, int64_t num_pages) {
    TORCH_CHECK(lengths[s] <= table.size(1) * page_size, kOp, ": ", name, " has room for ", table.size(1) * page_size,
                " slots but kv_length is ", lengths[s]);
    const int32_t* pages = pages_of(table, s).pages;
    for (int64_t j = 0; j * page_size < lengths[s]; ++j)
      TORCH_CHECK(pages[j] >= 0 && pages[j] < num_pages, kOp, ": ", name, " holds page ", pages[j], " of ", num_pages);
  };
  std::vector<int64_t> active;
  int64_t work = 0;
  for (int64_t s = 0; s < sequences; ++s) {
    if (lengths[s] == 0 || (state_table.size(1) > 0 && pages_of(state_table, s).pages[0] < 0)) continue;
    TORCH_CHECK(lengths[s] > 0 && lengths[s] <= most, kOp, ": kv_length holds ", lengths[s], " but score has ", most,
                " slots");
    for (const auto& [name, value] : {std::pair("keep", keeps[s]), std::pair("sealed", seals[s])})
      TORCH_CHECK(value >= 0 && value <= lengths[s], kOp, ": ", name, " holds ", value, " for a sequence of ",
                  lengths[s], " slots");
    check_pages("page_table", page_table, s, k_pool.size(0));
    check_pages("state_table", state_table, s, position.size(0));
    active.push_back(s);
    work += kv_heads * (keeps[s] < lengths[s] ? lengths[s] : lengths[s] - seals[s]);
  }

  const float* scores = score.const_data_ptr<float>();
  const Rows positions(position);
  dynamic_for(active.size() * kv_heads, 1 + work / kSlotsPerThread, [&](int64_t lane) {
    thread_local Scratch scratch;
    const int64_t s = active[lane / kv_heads], head = lane % kv_heads, kept = keeps[s], length = lengths[s];
    const Pages pages = pages_of(page_table, s), state = pages_of(state_table, s);
    const auto stored = [&](int64_t i) { return reinterpret_cast<int32_t*>(state.row(positions, i, head)); };
    const auto position_of = [&](int64_t i) {
      return i < seals[s] ? *stored(i) : static_cast<int32_t>(i + shifts[s]);
    };
    find_victims(scores + (s * kv_heads + head) * most, length, length - kept, position_of, scratch);
    // From here on all of the first `kept` are sealed, those from there on are as they were.
    for (int64_t i = seals[s]; i < kept; ++i) *stored(i) = static_cast<int32_t>(i + shifts[s]);
    const std::vector<int32_t>& victims = scratch.victims;
    auto behind = std::lower_bound(victims.begin(), victims.end(), kept);
    int64_t from = kept;
    for (auto hole = victims.begin(); hole < victims.end() && *hole < kept; ++hole, ++from) {
      for (; behind < victims.end() && *behind == from; ++behind) ++from;
      for (const Rows& rows : pools) pages.move(rows, from, *hole, head);
      for (const Rows& rows : statistics) state.move(rows, from, *hole, head);
      *stored(*hole) = position_of(from);
    }
  });
}

}  // namespace kvforge
