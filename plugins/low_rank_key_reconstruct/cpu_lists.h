// Lists of chunks of sequences and KV heads, as operators are given them, checked and cut into pieces of work.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "native/checks.h"

namespace kvforge {

constexpr int64_t kPiecesPerThread = 8;
constexpr int64_t kProductsPerThread = 1 << 18;  // multiplications that pay for waking a thread

// The pages of one sequence in a table.
struct ChunkPages {
  const char* op;
  const char* name;
  const int32_t* pages;
  int64_t width, page_size, num_pages;

  ChunkPages(const char* op, const char* name, const at::Tensor& table, int64_t sequence, int64_t page_size,
             int64_t num_pages)
      : op(op),
        name(name),
        pages(table.const_data_ptr<int32_t>() + sequence * table.size(1)),
        width(table.size(1)),
        page_size(page_size),
        num_pages(num_pages) {}

  // The page of the chunk whose first token is `token`, and where in it that is. A chunk does not cross pages.
  std::pair<int64_t, int64_t> find(int64_t token) const {
    const int64_t page = pages[token / page_size];
    return {page, token % page_size};
  }

  void check(const char* what, int64_t index, int64_t chunk_size) const {
    TORCH_CHECK(index >= 0 && index < width * page_size / chunk_size, op, ": ", what, " holds ", index, " but ", name,
                " has room for ", width * page_size / chunk_size);
    const int64_t page = find(index * chunk_size).first;
    TORCH_CHECK(page >= 0 && page < num_pages, op, ": ", name, " holds page ", page, " of ", num_pages);
  }
};

struct ListPiece {
  int64_t sequence, head, begin, end;  // of its chunks
};

inline void check_chunk_size(const char* op, int64_t chunk_size, int64_t page_size) {
  TORCH_CHECK(chunk_size > 0 && page_size % chunk_size == 0, op, ": chunk_size must be positive and divide the page "
              "size, ", page_size, ", but is ", chunk_size);
}

// How many chunks each list has before its end, checked: [S * kv_heads]. `pages` gives the pages of a sequence's
// chunks, `more(s, i)` checks what else belongs to chunk i of all lists' memory.
template <typename Pages, typename More>
std::vector<int64_t> check_lists(const char* op, const at::Tensor& chunks, const at::Tensor& slot, int64_t num_slots,
                                 int64_t num_positions, int64_t chunk_size, const Pages& pages, const More& more) {
  const int64_t sequences = chunks.size(0), kv_heads = chunks.size(1), length = chunks.size(2);
  const int32_t *listed = chunks.const_data_ptr<int32_t>(), *slots = slot.const_data_ptr<int32_t>();
  std::vector<int64_t> counts(sequences * kv_heads);
  for (int64_t s = 0; s < sequences; ++s) {
    if (slots[s] < 0) continue;
    TORCH_CHECK(slots[s] < num_slots, op, ": slot holds ", slots[s], " but sv has ", num_slots);
    for (int64_t i = s * kv_heads; i < (s + 1) * kv_heads; ++i) {
      int64_t& count = counts[i];
      for (; count < length && listed[i * length + count] >= 0; ++count) {
        const int64_t chunk = listed[i * length + count];
        pages(s).check("chunks", chunk, chunk_size);
        TORCH_CHECK((chunk + 1) * chunk_size <= num_positions, op, ": chunks holds ", chunk,
                    " but cos and sin have ", num_positions, " positions");
        more(s, i * length + count);
      }
    }
  }
  return counts;
}

// The lists in pieces of at least `fewest` tokens, but for what is left; each piece packs SV of its head.
inline std::vector<ListPiece> pieces_of_lists(const std::vector<int64_t>& counts, int64_t kv_heads, int64_t chunk_size,
                                              int64_t fewest, int64_t total_tokens, int64_t threads) {
  const int64_t tokens = std::max(fewest, total_tokens / (kPiecesPerThread * threads));
  const int64_t piece_chunks = (tokens + chunk_size - 1) / chunk_size;
  std::vector<ListPiece> pieces;
  for (int64_t i = 0; i < static_cast<int64_t>(counts.size()); ++i)
    for (int64_t begin = 0; begin < counts[i]; begin += piece_chunks)
      pieces.push_back({i / kv_heads, i % kv_heads, begin, std::min(counts[i], begin + piece_chunks)});
  return pieces;
}

}  // namespace kvforge
