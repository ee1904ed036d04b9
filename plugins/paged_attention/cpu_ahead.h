// Memory that is asked for before it is read: everything here has internal linkage (see cpu_rows.h).
#pragma once

#include <immintrin.h>

#include "native/cast.h"
#include "paged_attention/cpu_rows.h"

namespace kvforge {
namespace {

// The cache lines that are needed next, in the order of memory: the values of a piece, then the keys of the piece after
// it. They are asked for a few at a time between products: a burst would hold up the loads behind it.
class Ahead {
 public:
  // Adds what the heads of `work` have in a pool or its scales, if it has any.
  void add(const AttentionArgs& a, const PagedTensor& pool, const DirectWork& work) {
    if (pool.data == nullptr) return;
    const int64_t first = work.heads[0].kv_head, last = work.heads[work.count - 1].kv_head, element = pool.element_bytes;
    const int64_t bytes = (last - first) * pool.head_stride * element + pool.head_bytes;
    const int64_t stride = pool.slot_stride * element;
    const char* const data = static_cast<const char*>(pool.data) + first * pool.head_stride * element;
    for (int64_t key = work.begin; key < work.end;) {
      const int64_t page = key / a.page_size, slot = key - page * a.page_size;
      const int64_t slots = bytes == stride ? smaller(work.end - key, a.page_size - slot) : 1;
      from_[count_] = data + work.heads[0].pages[page] * pool.page_stride * element + slot * stride;
      bytes_[count_] = slots * bytes;
      lines_ += (bytes_[count_++] + 63) / 64;
      key += slots;
    }
  }

  // The same of keys or values and their scales.
  void add(const AttentionArgs& a, const PagedTensor& pool, const PagedTensor& scales, const DirectWork& work) {
    add(a, pool, work);
    add(a, scales, work);
  }

  // Lines that were added.
  int64_t lines() const { return lines_; }

  void fetch(int64_t lines) {
    while (lines > 0) {
      if (left_ == 0) {
        if (row_ == count_) return;
        at_ = from_[row_], left_ = (bytes_[row_] + 63) / 64, ++row_;
      }
      const int64_t some = smaller(lines, left_);
      const char* const end = at_ + some * 64;
      for (const char* line = at_; line < end; line += 64) _mm_prefetch(line, _MM_HINT_T1);
      at_ = end, left_ -= some, lines -= some;
    }
  }

 private:
  const char* from_[4 * kKeyBlock];
  int64_t bytes_[4 * kKeyBlock];
  int64_t count_ = 0, row_ = 0, left_ = 0, lines_ = 0;
  const char* at_ = nullptr;
};

}  // namespace
}  // namespace kvforge
