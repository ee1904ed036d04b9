#include "paged_attention/cpu_plan.h"

#include <algorithm>

namespace kvforge {
namespace {

constexpr int64_t kDirectRows = 16;               // more rows per KV head than this pay for packing the keys
constexpr int64_t kSplitTileRows = 1024;          // a sequence of fewer rows splits its keys also in tiles
constexpr int64_t kTileSplit = 8 * kKeyBlock;
constexpr int64_t kMaxPartialFloats = 16ll << 20;  // beyond which tiles are not split into blocks
constexpr int64_t kMaxPackedBytes = 64ll << 20;   // a batch's packed blocks, unless one KV head needs more
constexpr int64_t kPiecesPerThread = 4;

struct Sequence {
  Rows rows;  // of KV head 0, all rows
  int64_t queries;
};

struct Planner {
  const AttentionArgs& args;
  const int64_t kv_heads, block_bytes;
  const bool same_bits;
  Plan plan;

  int64_t add_rows(Rows rows, int64_t splits) {
    plan.rows.push_back(rows);
    plan.splits.push_back(splits);
    plan.partial.push_back(plan.partial_floats);
    if (splits > 1) plan.partial_floats += splits * (rows.row_end - rows.row_begin) * (args.head_dim + 2);
    return static_cast<int64_t>(plan.rows.size()) - 1;
  }

  int64_t first_key(int64_t position) const {
    return args.window > 0 ? std::max<int64_t>(0, position - args.window + 1) : 0;
  }

  void add_piece(Batch& batch, Piece piece) {
    batch.cost += piece.cost;
    batch.has_tiles |= !piece.direct;
    batch.pieces.push_back(piece);
  }

  void add_direct(const Sequence& s, int64_t heads_per_piece) {
    const int64_t rows = s.queries * args.group;
    const int64_t begin = s.rows.first_key, end = s.rows.end_key;
    const int64_t first_split = begin / kKeyBlock, splits = (end - 1) / kKeyBlock + 1 - first_split;
    for (int64_t h = 0; h < kv_heads; ++h) {
      Rows head = s.rows;
      head.kv_head = h;
      add_rows(head, splits);
    }
    const int64_t base = static_cast<int64_t>(plan.rows.size()) - kv_heads;
    for (int64_t split = 0; split < splits; ++split)
      for (int64_t h = 0; h < kv_heads; h += heads_per_piece) {
        const int64_t count = std::min(heads_per_piece, kv_heads - h);
        Piece piece{true, base + h, count, 0, 0, split, -1, 0};
        piece.begin = std::max(begin, (first_split + split) * kKeyBlock);
        piece.end = std::min(end, (first_split + split + 1) * kKeyBlock);
        piece.cost = (piece.end - piece.begin) * count * args.head_dim * (rows + 4) / 16;
        plan.direct_rows = std::max(plan.direct_rows, rows * count);
        add_piece(plan.batches.front(), piece);
      }
  }

  // Keys of a split of tiles, which follows from the sequence alone where the result's bits depend on it.
  int64_t keys_of_tile_split(const Sequence& s, int64_t all_rows) const {
    if (all_rows * kv_heads >= kSplitTileRows) return s.rows.end_key;
    if (!same_bits) return kTileSplit;
    const int64_t blocks = (s.rows.end_key - s.rows.first_key) / kKeyBlock + 2;
    const int64_t floats = plan.partial_floats + blocks * all_rows * (args.head_dim + 2);
    return floats <= kMaxPartialFloats ? kKeyBlock : s.rows.end_key;
  }

  void add_tiles(const Sequence& s, int64_t head) {
    const int64_t all_rows = s.queries * args.group, tiles = (all_rows + kTileRows - 1) / kTileRows;
    const int64_t split_keys = keys_of_tile_split(s, all_rows);
    const int64_t first_block = s.rows.first_key / kKeyBlock;
    Batch* batch = &plan.batches.front();
    int64_t packed = -1;
    if (tiles > 1) {
      const int64_t blocks = (s.rows.end_key - 1) / kKeyBlock + 1 - first_block;
      if (plan.batches.back().packed_bytes > 0 &&
          plan.batches.back().packed_bytes + blocks * block_bytes > kMaxPackedBytes)
        plan.batches.emplace_back();
      batch = &plan.batches.back();
      packed = batch->packed_bytes;
      for (int64_t b = 0; b < blocks; ++b)
        batch->packs.push_back({static_cast<int64_t>(plan.rows.size()), (first_block + b) * kKeyBlock,
                                packed + b * block_bytes});
      batch->packed_bytes += blocks * block_bytes;
      batch->cost += blocks * kKeyBlock * args.head_dim / 4;
    }
    for (int64_t t = 0; t < tiles; ++t) {
      Rows rows = s.rows;
      rows.kv_head = head;
      rows.row_begin = t * kTileRows;
      rows.row_end = std::min(all_rows, rows.row_begin + kTileRows);
      const int64_t begin = first_key(rows.first_position + rows.row_begin / args.group);
      const int64_t end = rows.first_position + (rows.row_end - 1) / args.group + 1;
      const int64_t first_split = begin / split_keys, splits = (end - 1) / split_keys + 1 - first_split;
      const int64_t index = add_rows(rows, splits);
      for (int64_t split = 0; split < splits; ++split) {
        Piece piece{false, index, 1, 0, 0, split, packed, 0};
        piece.begin = std::max(begin, (first_split + split) * split_keys);
        piece.end = std::min(end, (first_split + split + 1) * split_keys);
        if (packed >= 0) piece.packed += (piece.begin / kKeyBlock - first_block) * block_bytes;
        piece.cost = (piece.end - piece.begin) * args.head_dim * (rows.row_end - rows.row_begin + 16) / 64;
        add_piece(*batch, piece);
      }
    }
  }
};

}  // namespace

Plan make_plan(const AttentionArgs& args, const Step& step, int64_t kv_heads, const AttentionKernel& kernel,
               int64_t threads) {
  Planner planner{args, kv_heads, kernel.packed_bytes(args), kernel.same_bits, {}};
  planner.plan.batches.emplace_back();
  std::vector<Sequence> direct, tiled;
  int64_t direct_splits = 0;
  for (int64_t s = 0; s < step.sequences; ++s) {
    const int64_t queries = step.query_start[s + 1] - step.query_start[s];
    if (queries == 0) continue;
    const int64_t length = step.kv_length[s], first_key = planner.first_key(length - queries);
    const Rows rows{step.page_table + s * step.max_pages, 0, step.query_start[s], length - queries, first_key,
                    length, 0, queries * args.group, nullptr};
    const int64_t rows_per_head = queries * args.group;
    if ((queries == 1 || rows_per_head <= kDirectRows) && rows_per_head <= kernel.max_direct_rows) {
      direct.push_back({rows, queries});
      direct_splits += (length - 1) / kKeyBlock + 1 - first_key / kKeyBlock;
    } else {
      tiled.push_back({rows, queries});
    }
  }
  // All heads in one piece read the pools in memory order; fewer when threads would idle.
  int64_t heads_per_piece = kv_heads;
  while (heads_per_piece > 1 &&
         direct_splits * ((kv_heads + heads_per_piece - 1) / heads_per_piece) < threads * kPiecesPerThread)
    heads_per_piece = (heads_per_piece + 1) / 2;
  for (const Sequence& s : tiled)
    for (int64_t head = 0; head < kv_heads; ++head) planner.add_tiles(s, head);
  for (const Sequence& s : direct) planner.add_direct(s, heads_per_piece);
  for (Batch& batch : planner.plan.batches)
    if (batch.has_tiles) std::stable_sort(batch.pieces.begin(), batch.pieces.end(),
                     [](const Piece& a, const Piece& b) { return a.cost > b.cost; });
  return planner.plan;
}

}  // namespace kvforge
