// The product of prepared rows with a packed weight, panel by panel.
#pragma once

#include <algorithm>

#include "packed_linear/cpu_kernel.h"

namespace kvforge {

// Rows of a piece.
inline int64_t rows_of_piece(const LinearArgs& args, const LinearKernel& kernel) {
  const int64_t bytes = kernel.row_block / kernel.band_rows * kernel.band_bytes(args);
  return bytes > kernel.piece_bytes ? kernel.row_block / 2 : kernel.row_block;
}

inline int64_t depth_block(const LinearArgs& args, const LinearKernel& kernel) {
  return args.rows <= kernel.few_rows ? kernel.few_rows_depth_block : kernel.depth_block;
}

// The product of one block of rows and one panel after the other.
class Product {
 public:
  Product(const LinearArgs& args, const LinearKernel& kernel, int64_t groups)
      : args_(args), kernel_(kernel), groups_(groups), rows_(rows_of_piece(args, kernel)),
        // The rows of a single band have no turns to take.
        blocks_(args.rows <= kernel.band_rows ? 1 : (groups - 1) / depth_block(args, kernel) + 1) {}

  // rows: where the first prepared band would be; next: the piece after this one or -1.
  void run(int64_t piece, int64_t next, const char* rows, int64_t band_stride, float* sums) const {
    const int64_t begin = piece / args_.panels * rows_, panel = piece % args_.panels;
    const int64_t count = std::min(rows_, args_.rows - begin);
    rows += begin / kernel_.band_rows * band_stride;
    for (int64_t b = 0; b < blocks_; ++b) {
      const int64_t first = start(b);
      const bool last = b + 1 == blocks_;
      kernel_.multiply({
          .rows = rows + first * kernel_.row_group_bytes * kernel_.band_rows,
          .band_stride = band_stride,
          .num_rows = count,
          .weight = weight(panel, b),
          .groups = start(b + 1) - first,
          .next = !last ? weight(panel, b + 1) : next >= 0 ? weight(next % args_.panels, 0) : nullptr,
          .sums = sums,
          .add = b > 0,
      });
    }
    if (kernel_.dequantize != nullptr) kernel_.dequantize(args_, rows, band_stride, count, panel, sums);
    kernel_.finish(args_, begin, count, panel, sums);
  }

  int64_t pieces() const { return (args_.rows + rows_ - 1) / rows_ * args_.panels; }

 private:
  // Blocks begin at a multiple of 16 groups.
  int64_t start(int64_t block) const { return block == blocks_ ? groups_ : groups_ / 16 * block / blocks_ * 16; }

  const char* weight(int64_t panel, int64_t block) const {
    return args_.weight + (panel * groups_ + start(block)) * kernel_.panel_group_bytes;
  }

  const LinearArgs& args_;
  const LinearKernel& kernel_;
  const int64_t groups_, rows_, blocks_;
};

}  // namespace kvforge
