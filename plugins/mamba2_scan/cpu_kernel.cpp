// The recurrence of a block of columns of states, which do not depend on each other. Compiled once per instruction set
// into namespace KVFORGE_ISA, so no inline function with external linkage may be used here: the linker would keep one
// variant of it.
//
// A tile of a state stays in registers through a chunk of tokens. Its rows add to each token's result in turn, so a sum
// is in the order of the rows whatever the tiles and chunks are. A chunk ends with its block, and where a state is
// written; heads take it one after another, so that what they have in common stays in the second cache.
#include "mamba2_scan/cpu_kernel.h"

#include <cstring>
#include <type_traits>

#include "native/multiply_add.h"
#include "native/rows.h"
#include "native/softplus.h"

namespace kvforge {
namespace {

constexpr int64_t kVectors = 2;
constexpr int64_t kColumns = kVectors * kLanes;
constexpr int64_t kRows = kLanes > 8 ? 8 : 4;  // of a tile, twice the registers of what they sum and add

void clear(float* x, int64_t count) {
  for (int64_t i = 0; i < count; ++i) x[i] = 0.0f;
}

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Calls body(first row, number of rows) for each tile; the number is a constant, kRows or 1.
template <typename Body>
void for_tiles(int64_t state_dim, const Body& body) {
  int64_t i = 0;
  for (; i + kRows <= state_dim; i += kRows) body(i, std::integral_constant<int64_t, kRows>());
  for (; i < state_dim; ++i) body(i, std::integral_constant<int64_t, 1>());
}

// Where B's and then C's numbers of a tile's rows are, of a token and of those after it in its block. Blocks and their
// tiles lie in the order in which they are read.
template <bool has_queries>
float* factors_of(const Mamba2Scan& a, int64_t group, int64_t token, int64_t row, int64_t rows) {
  const int64_t size = scan_block(a.tokens), block = group * scan_blocks(a.tokens) + token / size;
  return a.factors + (has_queries ? 2 : 1) * ((block * a.state_dim + row) * size + token % size * rows);
}

// The steps and decays of a token's heads.
void time_steps(const Mamba2Scan& a, int64_t t) {
  const int64_t first = t * a.heads;
  float part[5][kLanes] = {};
  for (int64_t h = 0; h < a.heads; h += kLanes) {
    const int64_t size = smaller(a.heads - h, kLanes) * sizeof(float);
    std::memcpy(part[0], a.raw + first + h, size);
    std::memcpy(part[1], a.bias + h, size);
    std::memcpy(part[2], a.speed + h, size);
    const vfloat step = softplus_of(load(part[0]) + load(part[1]));
    store(part[3], step);
    store(part[4], exp_nonpositive(-load(part[2]) * step));
    std::memcpy(a.step + first + h, part[3], size);
    std::memcpy(a.decay + first + h, part[4], size);
  }
}

template <typename Element, bool has_queries>
void prepare_as(const Mamba2Scan& a, int64_t begin, int64_t end) {
  const int64_t n = a.state_dim, inner = a.heads * a.head_dim;
  for (int64_t t = begin; t < end; ++t) {
    time_steps(a, t);
    for (int64_t group = 0; group < a.groups; ++group) {
      const Element* b = static_cast<const Element*>(a.xbc) + t * a.token_stride + inner + group * n;
      for_tiles(n, [&](int64_t i, auto tile) {
        constexpr int64_t rows = tile.value;
        float* to = factors_of<has_queries>(a, group, t, i, rows);
        widen(b + i, to, rows);
        if constexpr (has_queries) widen(b + a.groups * n + i, to + rows, rows);
      });
    }
  }
}

// The tokens of a chunk, and a block of columns.
struct Chunk {
  int64_t tokens;
  const float* decay;  // [tokens]
  const float* added;  // [tokens, kColumns], B's factor
  float* sums;  // [tokens, 2, kColumns], of even and of odd rows
};

// Takes `rows` rows of a state through a chunk; `parity` is that of the first.
template <int64_t rows, bool has_queries>
void pass(
    const float* from, int64_t from_stride, float* to, int64_t to_stride, const float* b, const Chunk& chunk,
    int parity) {
  vfloat s[rows][kVectors];
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t v = 0; v < kVectors; ++v) s[i][v] = load(from + i * from_stride + v * kLanes);
  for (int64_t t = 0; t < chunk.tokens; ++t, b += (has_queries ? 2 : 1) * rows) {
    constexpr int64_t kParities = rows > 1 ? 2 : 1;
    float* place = chunk.sums + (2 * t + parity) * kColumns;
    vfloat sums[kParities][kVectors], added[kVectors];
    for (int64_t v = 0; v < kVectors; ++v) added[v] = load(chunk.added + t * kColumns + v * kLanes);
    if constexpr (has_queries)
      for (int64_t p = 0; p < kParities; ++p)
        for (int64_t v = 0; v < kVectors; ++v) sums[p][v] = load(place + p * kColumns + v * kLanes);
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t v = 0; v < kVectors; ++v) {
        s[i][v] = multiply_add(broadcast(b[i]), added[v], s[i][v] * chunk.decay[t]);
        if constexpr (has_queries) sums[i & 1][v] = multiply_add(broadcast(b[rows + i]), s[i][v], sums[i & 1][v]);
      }
    if constexpr (has_queries)
      for (int64_t p = 0; p < kParities; ++p)
        for (int64_t v = 0; v < kVectors; ++v) store(place + p * kColumns + v * kLanes, sums[p][v]);
  }
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t v = 0; v < kVectors; ++v) store(to + i * to_stride + v * kLanes, s[i][v]);
}

// A head's state before a chunk, in the pool or in scratch.
struct State {
  const float* from;
  float* kept;  // [state_dim, kColumns]
};

template <typename Element, bool has_queries>
void run(const Mamba2Scan& a, int64_t sequence, int64_t head, int64_t heads, int64_t first, float* scratch) {
  const int64_t n = a.state_dim, p = a.head_dim, count = smaller(p - first, kColumns);
  int64_t t = a.query_start[sequence];
  const int64_t end = a.query_start[sequence + 1];
  float *added = scratch, *sums = added + kScanTokens * kColumns, *x = sums + 2 * kScanTokens * kColumns;
  float *decay = x + kColumns, *kept = decay + kScanTokens;
  const auto row = [&](int64_t index, int64_t h) { return a.pool + (index * a.heads + h) * n * p + first; };
  const int32_t read = t < end ? a.state_read[sequence] : -1;
  const bool is_whole = count == kColumns;  // whole vectors go from and to the pool as they are
  if (!is_whole || read < 0) clear(scratch, scan_scratch(n, kColumns, heads));
  State states[kScanHeads];
  for (int64_t k = 0; k < heads; ++k) {
    float* own = kept + k * n * kColumns;
    if (!is_whole && read >= 0) copy_rows(row(read, head + k), p, own, kColumns, n, count);
    states[k] = {is_whole && read >= 0 ? row(read, head + k) : own, own};
  }
  while (t < end) {
    const int64_t begin = t, limit = smaller(end, begin - begin % kScanTokens + kScanTokens);
    while (a.state_write[t++] < 0 && t < limit) {}
    const Chunk chunk{t - begin, decay, added, sums};
    const int32_t write = a.state_write[t - 1];
    for (int64_t h = head; h < head + heads; ++h) {
      const Element* own = static_cast<const Element*>(a.xbc) + begin * a.token_stride + h * p + first;
      State& state = states[h - head];
      for (int64_t k = 0; k < chunk.tokens; ++k) {
        const int64_t of_head = (begin + k) * a.heads + h;
        decay[k] = a.decay[of_head];
        float* to = added + k * kColumns;
        widen(own + k * a.token_stride, to, count);
        for (int64_t v = 0; v < kVectors; ++v) store(to + v * kLanes, load(to + v * kLanes) * a.step[of_head]);
      }
      if constexpr (has_queries) clear(sums, 2 * chunk.tokens * kColumns);
      float* to = is_whole && write >= 0 ? row(write, h) : state.kept;
      const int64_t from_stride = state.from == state.kept ? kColumns : p, to_stride = to == state.kept ? kColumns : p;
      for_tiles(n, [&](int64_t i, auto tile) {
        constexpr int64_t rows = tile.value;
        const float* b = factors_of<has_queries>(a, h / (a.heads / a.groups), begin, i, rows);
        pass<rows, has_queries>(
            state.from + i * from_stride, from_stride, to + i * to_stride, to_stride, b, chunk, i & 1);
      });
      if (!is_whole && write >= 0) copy_rows(state.kept, kColumns, row(write, h), p, n, count);
      state.from = to;
      if constexpr (has_queries)
        for (int64_t k = 0; k < chunk.tokens; ++k) {
          const float* found = sums + 2 * k * kColumns;
          widen(own + k * a.token_stride, x, count);
          for (int64_t c = 0; c < kColumns; c += kLanes)
            store(x + c, multiply_add(broadcast(a.skip[h]), load(x + c), load(found + c) + load(found + kColumns + c)));
          narrow(x, static_cast<Element*>(a.out) + ((begin + k) * a.heads + h) * p + first, count);
        }
    }
  }
}

}  // namespace

namespace KVFORGE_ISA {

int64_t scan_columns() { return kColumns; }

void prepare(const Mamba2Scan& args, int64_t begin, int64_t end) {
  if (args.has_queries)
    args.is_bf16 ? prepare_as<bf16, true>(args, begin, end) : prepare_as<float, true>(args, begin, end);
  else
    args.is_bf16 ? prepare_as<bf16, false>(args, begin, end) : prepare_as<float, false>(args, begin, end);
}

void scan(const Mamba2Scan& args, int64_t sequence, int64_t head, int64_t heads, int64_t first, float* scratch) {
  if (args.has_queries)
    args.is_bf16 ? run<bf16, true>(args, sequence, head, heads, first, scratch)
                 : run<float, true>(args, sequence, head, heads, first, scratch);
  else
    args.is_bf16 ? run<bf16, false>(args, sequence, head, heads, first, scratch)
                 : run<float, false>(args, sequence, head, heads, first, scratch);
}

}  // namespace KVFORGE_ISA
}  // namespace kvforge
