// Divides a step's attention into pieces of work. The pieces depend on each sequence alone, so that a
// sequence's result is the same in any company; only how pieces are grouped depends on the whole step.
#pragma once

#include <cstdint>
#include <vector>

#include "paged_attention/cpu_kernel.h"

namespace kvforge {

struct Step {  // the checked index tensors
  const int32_t* query_start;
  const int32_t* kv_length;
  const int32_t* page_table;
  int64_t sequences, max_pages;
};

struct Piece {             // rows [rows, rows + count) of the plan over keys [begin, end)
  bool direct;             // straight from the pools; else as a tile of packed blocks
  int64_t rows, count;     // direct: `count` KV heads of one sequence
  int64_t begin, end, split;
  int64_t packed;          // offset of the packed blocks in the batch, -1: pack on the way
  int64_t cost;            // nanoseconds, roughly
};

struct Pack {
  int64_t rows;    // any rows of the sequence and KV head
  int64_t begin;   // first key of the block
  int64_t offset;  // in bytes
};

struct Batch {  // packs first, then pieces, longest first
  std::vector<Pack> packs;
  std::vector<Piece> pieces;
  int64_t packed_bytes = 0;
  int64_t cost = 0;
  bool has_tiles = false;
};

struct Plan {
  std::vector<Rows> rows;
  std::vector<int64_t> splits;  // of the same index: into how many pieces its keys are split
  std::vector<int64_t> partial; // offset of the partial results, in floats
  std::vector<Batch> batches;
  int64_t partial_floats = 0;
  int64_t direct_rows = 0;  // most rows of a direct piece
};

Plan make_plan(const AttentionArgs& args, const Step& step, int64_t kv_heads, const AttentionKernel& kernel,
               int64_t threads);

}  // namespace kvforge
