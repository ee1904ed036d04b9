// Sizes of sealed pages (plugins/seal_pages/layout.py), for kernels that know nothing of ATen.
#pragma once

#include <cstdint>

namespace kvforge {

constexpr int64_t kGroup = 32;     // lines that share a least number and a step in each column
constexpr int64_t kTileSide = 16;  // lines and columns of a tile

// A head's K of a page is a matrix of page_size lines and head_dim columns, its V of head_dim lines and page_size columns.
struct SealedLayout {
  int64_t page_size, kv_heads, head_dim, bits;

  // Bytes of a tile and of a head's codes in a page, and float16 numbers of its groups, of K as of V.
  int64_t tile() const { return kTileSide * kTileSide * bits / 8; }
  int64_t codes() const { return page_size * head_dim * bits / 8; }
  int64_t groups() const { return page_size * head_dim / kGroup * 2; }
};

}  // namespace kvforge
