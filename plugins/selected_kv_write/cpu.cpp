// kvforge::selected_kv_write on CPU: checks, then copies over ranges of tokens.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstring>

#include "native/checks.h"
#include "native/operators.h"

namespace kvforge {
namespace {

constexpr const char* kOp = "selected_kv_write";
constexpr int64_t kEntriesPerTask = 2048;
constexpr int64_t kAhead = 16;  // entries whose memory is asked for early

struct Pool {
  char* data;
  int64_t page_size, page_stride, slot_stride, head_stride;  // strides in bytes

  explicit Pool(const at::Tensor& t)
      : data(static_cast<char*>(const_cast<void*>(t.const_data_ptr()))),
        page_size(t.size(1)),
        page_stride(t.stride(0) * t.element_size()),
        slot_stride(t.stride(1) * t.element_size()),
        head_stride(t.stride(2) * t.element_size()) {}

  char* at(int64_t slot, int64_t head) const {
    return data + slot / page_size * page_stride + slot % page_size * slot_stride + head * head_stride;
  }
};

inline void fetch(const char* data, int64_t size) {
  for (int64_t i = 0; i < size; i += 64) __builtin_prefetch(data + i);
}

}  // namespace

void selected_kv_write(
    const at::Tensor& keys_in, const at::Tensor& host_v, const at::Tensor& rows_in, const at::Tensor& targets_in,
    at::Tensor& k_pool, at::Tensor& v_pool) {
  check_pools(kOp, k_pool, v_pool);
  check_float(kOp, "k_pool", k_pool, 4);
  const int64_t kv_heads = k_pool.size(2), head_dim = k_pool.size(3);
  check_float(kOp, "keys", keys_in, 3);
  check_float(kOp, "host_v", host_v, 4);
  TORCH_CHECK(keys_in.size(1) == kv_heads && keys_in.size(2) == head_dim, kOp, ": keys must be [N, ", kv_heads, ", ",
              head_dim, "] to fit the pools, not ", keys_in.sizes());
  TORCH_CHECK(host_v.size(2) == kv_heads && host_v.size(3) == head_dim, kOp, ": host_v must be [pages, page_size, ",
              kv_heads, ", ", head_dim, "] to fit the pools, not ", host_v.sizes());
  TORCH_CHECK(keys_in.scalar_type() == k_pool.scalar_type(), kOp, ": keys must have the dtype of the pools, ",
              k_pool.scalar_type(), ", not ", keys_in.scalar_type());
  TORCH_CHECK(host_v.scalar_type() == k_pool.scalar_type(), kOp, ": host_v must have the dtype of the pools, ",
              k_pool.scalar_type(), ", not ", host_v.scalar_type());
  TORCH_CHECK(host_v.stride(3) == 1, kOp, ": host_v must be contiguous in its last dimension");
  const int64_t count = keys_in.size(0);
  const at::Tensor rows_tensor = int32_tensor(kOp, "rows", rows_in, {count, kv_heads});
  const at::Tensor targets_tensor = int32_tensor(kOp, "targets", targets_in, {count, kv_heads});
  const int32_t *rows = rows_tensor.const_data_ptr<int32_t>(), *targets = targets_tensor.const_data_ptr<int32_t>();
  const int64_t num_rows = host_v.size(0) * host_v.size(1), num_slots = k_pool.size(0) * k_pool.size(1);
  for (int64_t i = 0; i < count * kv_heads; ++i) {
    if (targets[i] < 0) continue;
    TORCH_CHECK(targets[i] < num_slots, kOp, ": targets holds slot ", targets[i], " but the pools have ", num_slots);
    TORCH_CHECK(rows[i] >= 0 && rows[i] < num_rows, kOp, ": rows holds row ", rows[i], " but host_v has ", num_rows);
  }
  const at::Tensor keys = keys_in.contiguous();
  const char* source = static_cast<const char*>(keys.const_data_ptr());
  const Pool k(k_pool), v(v_pool), host(host_v);
  const int64_t size = head_dim * keys.element_size();
  at::parallel_for(0, count, std::max<int64_t>(1, kEntriesPerTask / std::max<int64_t>(1, kv_heads)),
                   [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * kv_heads; i < end * kv_heads; ++i) {
      const int64_t ahead = i + kAhead;
      if (ahead < end * kv_heads && targets[ahead] >= 0) {
        fetch(source + ahead * size, size);
        fetch(host.at(rows[ahead], ahead % kv_heads), size);
      }
      if (targets[i] < 0) continue;
      const int64_t head = i % kv_heads;
      std::memcpy(k.at(targets[i], head), source + i * size, size);
      std::memcpy(v.at(targets[i], head), host.at(rows[i], head), size);
    }
  });
}

}  // namespace kvforge
