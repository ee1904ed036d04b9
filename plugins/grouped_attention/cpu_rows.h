// What rows see: everything here has internal linkage, as kernels are compiled once per instruction set.
#pragma once

#include "grouped_attention/cpu_kernel.h"
#include "paged_attention/cpu_rows.h"

namespace kvforge {
namespace {

inline int64_t position(const GroupedArgs& a, const GroupedRows& rows, int64_t row) {
  return rows.first_position + row / a.group;
}

// Index of the row in [T, heads] order.
inline int64_t token_head(const GroupedArgs& a, const GroupedRows& rows, int64_t row) {
  return (rows.first_token + row / a.group) * a.heads + rows.kv_head * a.group + row % a.group;
}

inline int64_t first_key(const GroupedArgs& a, int64_t position) {
  return a.window > 0 ? larger(0, position - a.window + 1) : 0;
}

// The first key that a query reads exactly, if it sees it.
inline int64_t own_page(const GroupedArgs& a, int64_t position) {
  return position / a.layout.page_size * a.layout.page_size;
}

// The sealed keys [low, high) that rows see; not all of them see each, and there may be none.
struct SealedKeys {
  int64_t low, high;

  SealedKeys(const GroupedArgs& a, const GroupedRows& rows)
      : low(first_key(a, position(a, rows, rows.row_begin))),
        high(a.num_pages > 0 ? own_page(a, position(a, rows, rows.row_end - 1)) : 0) {}

  int64_t first_block() const { return low / kBlock; }
  int64_t num_blocks() const { return low < high ? (high - 1) / kBlock + 1 - first_block() : 0; }
};

// Slots of the rows: blocks of sealed keys and parts of a page.
inline int64_t num_slots(const GroupedArgs& a, const GroupedRows& rows) {
  return SealedKeys(a, rows).num_blocks() + round_up(a.layout.page_size, kBlock) / kBlock;
}

}  // namespace
}  // namespace kvforge
