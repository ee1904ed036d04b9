// A piece's keys and values, asked for before they are used: everything here has internal linkage (see cpu_rows.h).
#pragma once

#include <immintrin.h>

#include "paged_attention/cpu_rows.h"

namespace kvforge {
namespace {

// Where the first bytes of keys lie in a pool, of KV head 0: those of keys [begin, end) from `base` on; the others have
// those of the nearest one, and weigh nothing.
struct Places {
  const char* of[kKeyBlock];

  Places(const AttentionArgs& a, const PagedTensor& pool, const int32_t* pages, int64_t base, int64_t padded, int64_t begin,
         int64_t end) {
    int64_t offsets[kKeyBlock];
    key_offsets(a, pool, pages, begin, end, offsets + begin - base);
    for (int64_t i = 0; i < begin - base; ++i) offsets[i] = offsets[begin - base];
    for (int64_t i = end - base; i < padded; ++i) offsets[i] = offsets[end - base - 1];
    for (int64_t i = 0; i < padded; ++i) of[i] = static_cast<const char*>(pool.data) + offsets[i] * pool.element_bytes;
  }
};

// The vectors of a piece in the order of their use: keys, then values, in slabs in which the KV heads have their turns.
// They are asked for a few at a time and a fixed number of bytes before their use, into the first-level cache: while its
// few misses wait for memory, even loads from the second level would wait behind them.
class Stream {
 public:
  // keys, values: `padded` of each; k_slab, v_slab: how many a slab has; skips_k, skips_v: these are not asked for.
  Stream(const AttentionArgs& a, const DirectWork& work, const Places& keys, const Places& values, int64_t padded,
         int64_t k_slab, int64_t v_slab, bool skips_k = false, bool skips_v = false)
      : work_(work), of_{keys.of, values.of}, stride_{head_bytes_apart(a.k), head_bytes_apart(a.v)},
        bytes_{skips_k ? 0 : a.k.head_bytes, skips_v ? 0 : a.v.head_bytes}, slab_{k_slab, v_slab}, padded_(padded),
        stop_(smaller(k_slab, padded)) {
    if (skips_k && skips_v) half_ = 2;
    fetch(kAhead / a.k.head_bytes);
  }

  // Asks for the next `keys` vectors.
  void fetch(int64_t keys) {
    while (keys > 0 && half_ < 2) {
      const int64_t some = smaller(keys, stop_ - key_), bytes = bytes_[half_];
      if (bytes > 0) {
        const int64_t shift = work_.heads[head_].kv_head * stride_[half_];
        for (int64_t i = key_; i < key_ + some; ++i)
          for (int64_t b = 0; b < bytes; b += 64) _mm_prefetch(of_[half_][i] + shift + b, _MM_HINT_NTA);
      }
      keys -= some, key_ += some;
      if (key_ == stop_) next_head();
    }
  }

 private:
  static constexpr int64_t kAhead = 8 << 10;  // bytes

  static int64_t head_bytes_apart(const PagedTensor& pool) { return pool.head_stride * pool.element_bytes; }

  void next_head() {
    key_ = begin_;
    if (++head_ < work_.count) return;
    head_ = 0;
    key_ = begin_ = stop_;
    if (begin_ == padded_) key_ = begin_ = 0, ++half_;
    stop_ = smaller(begin_ + slab_[half_ & 1], padded_);
  }

  const DirectWork& work_;
  const char* const* const of_[2];
  const int64_t stride_[2], bytes_[2], slab_[2], padded_;
  int64_t half_ = 0, begin_ = 0, stop_, head_ = 0, key_ = 0;
};

}  // namespace
}  // namespace kvforge
