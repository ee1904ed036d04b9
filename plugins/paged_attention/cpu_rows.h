// Address arithmetic shared by the kernels: everything here has internal linkage (see cpu_fp32.h).
#pragma once

#include "paged_attention/cpu_kernel.h"

namespace kvforge {
namespace {

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

inline int64_t num_rows(const Rows& rows) { return rows.row_end - rows.row_begin; }

inline int64_t position(const AttentionArgs& a, const Rows& rows, int64_t row) {
  return rows.first_position + row / a.group;
}

// The query head of the row.
inline int64_t query_head(const AttentionArgs& a, const Rows& rows, int64_t row) {
  return rows.kv_head * a.group + row % a.group;
}

// Index of the row in [T, heads] order.
inline int64_t token_head(const AttentionArgs& a, const Rows& rows, int64_t row) {
  return (rows.first_token + row / a.group) * a.heads + query_head(a, rows, row);
}

// Element offset of the row's query.
inline int64_t query_offset(const AttentionArgs& a, const Rows& rows, int64_t row) {
  return (rows.first_token + row / a.group) * a.q_token_stride + query_head(a, rows, row) * a.q_head_stride;
}

// The keys [*first, *last) among [begin, end) that a query at this position sees.
inline void visible_keys(const AttentionArgs& a, int64_t position, int64_t begin, int64_t end, int64_t* first,
                         int64_t* last) {
  *first = a.window > 0 ? larger(begin, position - a.window + 1) : begin;
  *last = smaller(end, position + 1);
}

// Element offsets of keys [begin, end) in the pool, of KV head 0.
inline void key_offsets(const AttentionArgs& a, const PagedTensor& pool, const int32_t* pages, int64_t begin,
                        int64_t end, int64_t* offsets) {
  for (int64_t key = begin; key < end;) {
    const int64_t page = key / a.page_size, slot = key - page * a.page_size;
    const int64_t stop = smaller(end, key + a.page_size - slot);
    int64_t offset = pages[page] * pool.page_stride + slot * pool.slot_stride;
    for (; key < stop; ++key, offset += pool.slot_stride) *offsets++ = offset;
  }
}

}  // namespace
}  // namespace kvforge
