// Keys and values of the pools as float32. Used by files that are compiled once per instruction set: everything here has
// internal linkage.
#pragma once

#include <type_traits>

#include "native/simd.h"
#include "native/transpose.h"
#include "paged_attention/cpu_rows.h"

namespace kvforge {
namespace {

template <typename Pool>
constexpr int kPerWord = 4 / static_cast<int>(sizeof(Pool));  // elements in 32 bits
template <>
constexpr int kPerWord<int4> = 8;

// Element i of each word.
template <typename Pool>
inline vfloat element(vint words, int i) {
  if constexpr (std::is_same_v<Pool, float>) return reinterpret_cast<vfloat>(words);
  else if constexpr (std::is_same_v<Pool, bf16>)
    return reinterpret_cast<vfloat>(i == 0 ? words << 16 : words & static_cast<int32_t>(0xffff0000));
  else if constexpr (std::is_same_v<Pool, fp8>) return from_e4m3(words >> 8 * i);
  else if constexpr (std::is_same_v<Pool, int4>) return __builtin_convertvector((words << (28 - 4 * i)) >> 28, vfloat);
  else return __builtin_convertvector((words << (24 - 8 * i)) >> 24, vfloat);
}

// out[e * stride + lane] = element e of row `lane`, for kLanes rows of `count` elements; Whole: as many as fit into a
// vector.
template <bool Whole, typename Pool>
inline void transpose_elements(const Pool* const* rows, int64_t first, int64_t count, float* out, int64_t stride) {
  vint x[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    x[i] = vint{};
    std::memcpy(&x[i], advance(rows[i], first), Whole ? sizeof x[i] : bytes_of<Pool>(count));
  }
  transpose(x);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < kPerWord<Pool>; ++j) {
      const int64_t e = i * kPerWord<Pool> + j;
      if (Whole || e < count) store(out + e * stride, element<Pool>(x[i], j));
    }
}

// out[d * stride + lane] = element d of key `lane`, for kLanes keys.
template <typename Pool>
inline void transpose_keys(const Pool* const* keys, int64_t dim, float* out, int64_t stride) {
  constexpr int64_t kWhole = kLanes * kPerWord<Pool>;
  int64_t d = 0;
  for (; d + kWhole <= dim; d += kWhole) transpose_elements<true>(keys, d, kWhole, out + d * stride, stride);
  if (d < dim) transpose_elements<false>(keys, d, dim - d, out + d * stride, stride);
}

template <typename Pool>
inline float number(const Pool* row, int64_t i) {
  if constexpr (std::is_same_v<Pool, int4>) return static_cast<float>(static_cast<int8_t>(row[i / 2].bits << 4 * (1 - i % 2)) >> 4);
  else return to_float(row[i]);
}

// A row of values, padded with zeros to `padded` elements.
template <typename Pool>
inline void load_values(const Pool* v, int64_t dim, int64_t padded, float* out) {
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) store(out + d, load(advance(v, d)));
  for (; d < dim; ++d) out[d] = number(v, d);
  for (; d < padded; ++d) out[d] = 0;
}

// K or V of keys in a pool, whatever its type.
class KeyRows {
 public:
  KeyRows(const AttentionArgs& a, const PagedTensor& pool, const Rows& rows, int64_t begin, int64_t end)
      : pool_(pool), begin_(begin), end_(end) {
    key_offsets(a, pool, rows.pages, begin, end, offsets_);
  }

  // Fetches what a head has of keys [first, last).
  void fetch(int64_t first, int64_t last, int64_t kv_head) const {
    for (int64_t key = first; key < last; ++key)
      for (int64_t b = 0; b < pool_.head_bytes; b += 64) __builtin_prefetch(place(key, kv_head) + b, 0, 2);
  }

  // out[d * stride + i] = number d of key first + i, for `count` keys, a multiple of kLanes.
  void transpose(int64_t first, int64_t count, int64_t kv_head, int64_t dim, float* out, int64_t stride) const {
    with_type([&](auto pool) {
      using Pool = decltype(pool);
      for (int64_t key = 0; key < count; key += kLanes) {
        const Pool* keys[kLanes];
        for (int64_t i = 0; i < kLanes; ++i)
          keys[i] = reinterpret_cast<const Pool*>(place(first + key + i, kv_head));
        transpose_keys(keys, dim, out + key, stride);
      }
    });
  }

  // The numbers of keys [first, last), each padded with zeros to `padded`.
  void load(int64_t first, int64_t last, int64_t kv_head, int64_t dim, int64_t padded, float* out) const {
    with_type([&](auto pool) {
      for (int64_t key = first; key < last; ++key, out += padded)
        load_values(reinterpret_cast<const decltype(pool)*>(place(key, kv_head)), dim, padded, out);
    });
  }

 private:
  // Of the keys [begin, end), or of the nearest one of these.
  const char* place(int64_t key, int64_t kv_head) const {
    const int64_t nearest = larger(begin_, smaller(key, end_ - 1));
    const int64_t offset = offsets_[nearest - begin_] + kv_head * pool_.head_stride;
    return static_cast<const char*>(pool_.data) + offset * pool_.element_bytes;
  }

  // Calls body(Pool{}) with a value of the pool's type.
  template <typename Body>
  void with_type(const Body& body) const {
    switch (pool_.type) {
      case Dtype::float32: return body(float{});
      case Dtype::bfloat16: return body(bf16{});
      case Dtype::fp8: return body(fp8{});
      case Dtype::int8: return body(int8_t{});
      case Dtype::int4: return body(int4{});
    }
  }

  const PagedTensor& pool_;
  int64_t begin_, end_;
  int64_t offsets_[kKeyBlock];
};

}  // namespace
}  // namespace kvforge
