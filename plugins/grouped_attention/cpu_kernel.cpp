// The kernel. A sealed number is (code - half of the largest code) * step + middle. So a score is a product of the codes with the query times the
// steps of its channels, plus the query times their middles, which all 32 keys of a group share; a sum of values is a product
// of the codes with the weights times the steps of their tokens, plus the weights times their middles. A row has the same
// bits whatever is beside it: a slot's products are sums in the order of the columns, its softmax is relative to its own
// largest score, and slots are added one after the other.
// Compiled once per instruction set into namespace KVFORGE_ISA, so no inline function with external linkage may be used
// here.
#include <type_traits>

#include "grouped_attention/cpu_block.h"
#include "grouped_attention/cpu_products.h"

namespace kvforge {
namespace {

constexpr int64_t kStrip = 8;  // rows that are worked on at once

constexpr int64_t tile_bytes(int bits) { return bits == kExactBits ? kPlainTile : kTileSide * kTileSide * bits / 8; }

struct Scratch {
  float *queries, *sums;  // of all rows, [rows, head_dim]
  float *numbers;         // steps and middles of a group's channels, [2, head_dim]
  float *scores;          // of a strip, [kStrip, kBlock], and then its weights
  float *fresh;           // a strip's sums over one slot, [kStrip, head_dim]
  Term* terms;            // of a strip, [kStrip, the longer of head_dim and kBlock]
  char* exact;
  int64_t bytes;

  Scratch(const GroupedArgs& a, char* from) {
    const int64_t dim = a.layout.head_dim;
    char* at = from;
    const auto take = [&](auto*& place, int64_t size) {
      place = reinterpret_cast<std::remove_reference_t<decltype(place)>>(at);
      at += round_up(size * static_cast<int64_t>(sizeof *place), 64);
    };
    take(queries, kPieceRows * dim);
    take(sums, kPieceRows * dim);
    take(numbers, 2 * dim);
    take(scores, kStrip * kBlock);
    take(fresh, kStrip * dim);
    take(terms, kStrip * larger(dim, kBlock));
    take(exact, exact_bytes(a));
    bytes = at - from;
  }
};

// Rows of a piece that see a block: [begin, end) of it, and which of the keys each of them sees.
struct Strip {
  int64_t count;
  int64_t first[kStrip], last[kStrip];  // positions
};

// Steps and middles of 32 numbers.
template <int Bits>
inline void step_and_middle(const uint16_t* least, const uint16_t* step, vfloat out[2]) {
  out[0] = load_half(step);
  out[1] = load_half(least) + out[0] * (((1 << Bits) - 1) / 2.0f);
}

// The terms of rows for the channels of one group of keys, and what these share of a score.
template <int Bits>
inline void key_terms(const GroupedArgs& a, const uint16_t* numbers, const float* queries, int64_t count,
                      const Scratch& s, float shared[kStrip]) {
  const int64_t dim = a.layout.head_dim;
  for (int64_t d = 0; d < dim; d += kLanes) {
    vfloat both[2];
    step_and_middle<Bits>(numbers + d, numbers + dim + d, both);
    store(s.numbers + d, both[0]);
    store(s.numbers + dim + d, both[1]);
  }
  for (int64_t r = 0; r < count; ++r) {
    vfloat total{};
    for (int64_t d = 0; d < dim; d += kGroup) {
      vfloat scaled[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        const vfloat q = load(queries + r * dim + d + v * kLanes);
        scaled[v] = q * load(s.numbers + d + v * kLanes);
        total += q * load(s.numbers + dim + d + v * kLanes);
      }
      store_terms(s.terms + r * dim + d, scaled);
    }
    shared[r] = sum(total);
  }
}

template <int Bits>
void score_keys(const GroupedArgs& a, const KeyBlock& block, const float* queries, int64_t count, const Scratch& s,
                const KeyBlock* next) {
  const int64_t dim = a.layout.head_dim;
  constexpr int64_t kTileBytes = tile_bytes(Bits);
  float shared[kStrip] = {};
  if constexpr (Bits == kExactBits)
    for (int64_t i = 0; i < count * dim; i += kGroup) {
      vfloat x[kVectors];
      for (int v = 0; v < kVectors; ++v) x[v] = load(queries + i + v * kLanes);
      store_terms(s.terms + i, x);
    }
  for (int64_t g = 0; g < block.num_groups(); ++g) {
    if (next != nullptr && g < next->num_groups()) fetch(a, *next, g);
    if constexpr (Bits != kExactBits) key_terms<Bits>(a, block.k_numbers[g], queries, count, s, shared);
    float* const scores = s.scores + block.begin - block.base + g * kGroup;
    in_row_groups(count, [&](int64_t r, auto rows) __attribute__((always_inline)) {
      vfloat sums[rows.value][kVectors] = {};
      const char* tile = block.k[g];
      for (int64_t d = 0; d < dim; d += kTileSide, tile += kTileBytes)
        add_tiles<rows.value, Bits>(sums, tile, tile + block.k_line, s.terms + r * dim + d, dim);
      for (int i = 0; i < rows.value; ++i)
        for (int v = 0; v < kVectors; ++v) store(scores + (r + i) * kBlock + v * kLanes, sums[i][v] + shared[r + i]);
    });
  }
}

// The terms of a row's weights for 32 channels and one group of keys; adds what these channels share of a sum.
inline void value_terms(const float* weights, const vfloat* steps, const vfloat* middles, Term* terms, vfloat& shared) {
  vfloat scaled[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    const vfloat weight = load(weights + v * kLanes);
    scaled[v] = weight * steps[v];
    shared += weight * middles[v];
  }
  store_terms(terms, scaled);
}

// For 32 channels of sealed values. A key that a row does not see has no number, as it may not be one.
template <int Bits>
void all_value_terms(const GroupedArgs& a, const KeyBlock& block, const Strip& strip, int64_t channel, const Scratch& s,
                     vfloat shared[kStrip]) {
  for (int64_t g = 0; g < block.num_groups(); ++g) {
    const uint16_t* numbers = block.v_numbers[g] + channel / kGroup * block.v_next;
    const int64_t key = block.begin + g * kGroup, place = key - block.base;
    vfloat steps[kVectors], middles[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      vfloat both[2];
      step_and_middle<Bits>(numbers + v * kLanes, numbers + a.layout.page_size + v * kLanes, both);
      steps[v] = both[0];
      middles[v] = both[1];
    }
    for (int64_t r = 0; r < strip.count; ++r) {
      vfloat seen_steps[kVectors], seen_middles[kVectors];
      const int64_t first = larger(strip.first[r] - key, 0), last = larger(smaller(strip.last[r] - key, kGroup), 0);
      for (int v = 0; v < kVectors; ++v) {
        seen_steps[v] = steps[v];
        seen_middles[v] = middles[v];
      }
      if (first > 0 || last < kGroup)
        for (int v = 0; v < kVectors; ++v) {
          const vint lane = iota() + v * kLanes;
          const vint seen = (lane >= static_cast<int32_t>(first)) & (lane < static_cast<int32_t>(last));
          seen_steps[v] = seen ? steps[v] : vfloat{};
          seen_middles[v] = seen ? middles[v] : vfloat{};
        }
      value_terms(s.scores + r * kBlock + place, seen_steps, seen_middles, s.terms + r * kBlock + place, shared[r]);
    }
  }
}

template <int Bits>
void weigh_values(const GroupedArgs& a, const KeyBlock& block, const Strip& strip, const Scratch& s) {
  const int64_t dim = a.layout.head_dim, from = block.begin - block.base;
  constexpr int64_t kTileBytes = tile_bytes(Bits);
  if constexpr (Bits == kExactBits)
    for (int64_t r = 0; r < strip.count; ++r)
      for (int64_t j = from; j < from + block.end - block.begin; j += kGroup) {
        vfloat x[kVectors];
        for (int v = 0; v < kVectors; ++v) x[v] = load(s.scores + r * kBlock + j + v * kLanes);
        store_terms(s.terms + r * kBlock + j, x);
      }
  for (int64_t channel = 0; channel < dim; channel += kGroup) {
    vfloat shared[kStrip] = {};
    if constexpr (Bits != kExactBits) all_value_terms<Bits>(a, block, strip, channel, s, shared);
    in_row_groups(strip.count, [&](int64_t r, auto rows) __attribute__((always_inline)) {
      vfloat sums[rows.value][kVectors] = {};
      for (int64_t g = 0; g < block.num_groups(); ++g) {
        const char* tile = block.v[g] + channel / kTileSide * block.v_line;
        const Term* terms = s.terms + r * kBlock + from + g * kGroup;
        for (int64_t t = 0; t < kGroup; t += kTileSide, tile += kTileBytes)
          add_tiles<rows.value, Bits>(sums, tile, tile + block.v_line, terms + t, kBlock);
      }
      for (int i = 0; i < rows.value; ++i) {
        const float rest = sum(shared[r + i]);
        for (int v = 0; v < kVectors; ++v)
          store(s.fresh + (r + i) * dim + channel + v * kLanes, sums[i][v] + rest);
      }
    });
  }
}

// Where results go: to the rows' sums, or to the partial results of a slot.
struct Target {
  RowSums* rows;
  float* partial;
};

// Rows [begin, end) of a piece over one block.
template <int Bits>
void attend_block(const GroupedArgs& a, const GroupedRows& rows, int64_t begin, int64_t end, const KeyBlock& block,
                  const KeyBlock* next, const Target& target, const Scratch& s) {
  const int64_t dim = a.layout.head_dim;
  for (int64_t top_row = begin; top_row < end; top_row += kStrip) {
    Strip strip{smaller(kStrip, end - top_row), {}, {}};
    for (int64_t r = 0; r < strip.count; ++r) {
      const int64_t at = position(a, rows, rows.row_begin + top_row + r);
      strip.first[r] = larger(block.begin, first_key(a, at));
      strip.last[r] = smaller(block.end, Bits == kExactBits ? at + 1 : own_page(a, at));
    }
    score_keys<Bits>(a, block, s.queries + top_row * dim, strip.count, s, top_row == begin ? next : nullptr);
    const int64_t from = block.begin - block.base, width = block.end - block.begin;
    float tops[kStrip], totals[kStrip] = {};
    for (int64_t r = 0; r < strip.count; ++r) {
      float* const scores = s.scores + r * kBlock + from;
      if (strip.first[r] < strip.last[r])
        totals[r] = softmax_row(scores, width, strip.first[r] - block.begin, strip.last[r] - block.begin, a.scale, tops + r);
      else
        std::memset(scores, 0, width * sizeof(float));
    }
    weigh_values<Bits>(a, block, strip, s);
    for (int64_t r = 0; r < strip.count; ++r) {
      const float* fresh = s.fresh + r * dim;
      if (totals[r] == 0) continue;
      if (target.partial == nullptr) {
        add_block(target.rows[top_row + r], fresh, tops[r], totals[r], dim);
        continue;
      }
      float* const partial = target.partial + (top_row + r) * (dim + 2);
      std::memcpy(partial, fresh, dim * sizeof(float));
      partial[dim] = tops[r];
      partial[dim + 1] = totals[r];
    }
  }
}

void load_queries(const GroupedArgs& a, const GroupedRows& rows, float* out) {
  const int64_t dim = a.layout.head_dim;
  for (int64_t r = rows.row_begin; r < rows.row_end; ++r, out += dim) {
    const int64_t from = (rows.first_token + r / a.group) * a.q_token_stride +
        (rows.kv_head * a.group + r % a.group) * a.q_head_stride;
    for (int64_t d = 0; d < dim; d += kLanes)
      store(out + d, a.is_bf16 ? load(static_cast<const bf16*>(a.q) + from + d) : load(static_cast<const float*>(a.q) + from + d));
  }
}

void finish(const GroupedArgs& a, const GroupedRows& rows, int64_t row, const RowSums& sums) {
  const int64_t dim = a.layout.head_dim, to = token_head(a, rows, rows.row_begin + row) * dim;
  const float inverse = 1.0f / sums.total;
  for (int64_t d = 0; d < dim; ++d) {
    if (a.is_bf16) store(static_cast<bf16*>(a.out) + to + d, sums.sums[d] * inverse);
    else store(static_cast<float*>(a.out) + to + d, sums.sums[d] * inverse);
  }
}

// The part of the rows' own pages that is `part` * kBlock keys from their beginning.
void attend_own(const GroupedArgs& a, const GroupedRows& rows, int64_t part, const Target& target, const Scratch& s) {
  const int64_t count = rows.row_end - rows.row_begin;
  const auto own = [&](int64_t r) { return own_page(a, position(a, rows, rows.row_begin + r)); };
  for (int64_t begin = 0, end = 0; begin < count; begin = end) {
    while (end < count && own(end) == own(begin)) ++end;
    const int64_t first = own(begin) + part * kBlock;
    const int64_t last = smaller(position(a, rows, rows.row_begin + end - 1) + 1, first + kBlock);
    if (first >= last) continue;
    const KeyBlock block = a.is_bf16 ? exact_block<bf16>(a, rows, first, last, s.exact)
                                     : exact_block<float>(a, rows, first, last, s.exact);
    attend_block<kExactBits>(a, rows, begin, end, block, nullptr, target, s);
  }
}

void attend(const GroupedArgs& a, const GroupedRows& rows, int64_t begin, int64_t end, float* partial, char* scratch) {
  const Scratch s(a, scratch);
  const int64_t count = rows.row_end - rows.row_begin, dim = a.layout.head_dim;
  const SealedKeys keys(a, rows);
  const int64_t blocks = keys.num_blocks();
  RowSums sums[kPieceRows];
  load_queries(a, rows, s.queries);
  std::memset(s.sums, 0, count * dim * sizeof(float));
  for (int64_t r = 0; r < count; ++r) sums[r].sums = s.sums + r * dim;
  const auto block_at = [&](int64_t slot) {
    const int64_t base = (keys.first_block() + slot) * kBlock;
    return sealed_block(a, rows, larger(base, keys.low / kGroup * kGroup), smaller(base + kBlock, keys.high));
  };
  KeyBlock block, next;
  if (begin < blocks) next = block_at(begin);
  for (int64_t slot = begin; slot < end; ++slot) {
    Target target{sums, nullptr};
    if (partial != nullptr) {
      target.partial = partial + slot * count * (dim + 2);
      for (int64_t r = 0; r < count; ++r) target.partial[r * (dim + 2) + dim + 1] = 0;
    }
    if (slot >= blocks) {
      attend_own(a, rows, slot - blocks, target, s);
      continue;
    }
    block = next;
    const bool has_next = slot + 1 < smaller(end, blocks);
    if (has_next) next = block_at(slot + 1);
    const int64_t bits = a.layout.bits;
    const auto of_bits = bits == 2 ? attend_block<2> : bits == 3 ? attend_block<3> : attend_block<4>;
    of_bits(a, rows, 0, count, block, has_next ? &next : nullptr, target, s);
  }
  if (partial != nullptr) return;
  for (int64_t r = 0; r < count; ++r) finish(a, rows, r, sums[r]);
}

void merge(const GroupedArgs& a, const GroupedRows& rows, const float* partial, char* scratch) {
  const Scratch s(a, scratch);
  const int64_t count = rows.row_end - rows.row_begin, dim = a.layout.head_dim, slots = num_slots(a, rows);
  for (int64_t r = 0; r < count; ++r) {
    std::memset(s.sums, 0, dim * sizeof(float));
    RowSums row{s.sums};
    for (int64_t slot = 0; slot < slots; ++slot) {
      const float* part = partial + (slot * count + r) * (dim + 2);
      add_block(row, part, part[dim], part[dim + 1], dim);
    }
    finish(a, rows, r, row);
  }
}

int64_t scratch_bytes(const GroupedArgs& a) { return Scratch(a, nullptr).bytes; }

}  // namespace

namespace KVFORGE_ISA {

extern const GroupedKernel grouped_kernel = {scratch_bytes, attend, merge};

}  // namespace KVFORGE_ISA
}  // namespace kvforge
