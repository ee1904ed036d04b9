// The kernel for bfloat16 queries and pools of int8 and int4 by VNNI. A row has the same bits from tiles and directly: the
// sums of a key block are exact (cpu_vnni.h), and blocks are added one after the other (add_block).
#include "paged_attention/cpu_ahead.h"
#include "paged_attention/cpu_stream.h"
#include "paged_attention/cpu_vnni.h"

namespace kvforge {
namespace {

constexpr int64_t kStrip = 16;  // rows of a tile that are worked on at once
constexpr int64_t kStep = 32;   // direct() works on whole ones, of keys
constexpr int64_t kSlabBytes = 16 << 10;

// Whether several heads of a pool are in a line: they would ask for it twice, and some of them in bursts. So the next piece
// is fetched as it lies in memory.
bool shares_lines(const PagedTensor& pool) { return pool.head_bytes < 64; }

// Keys of which all heads are worked on in turn: in more bytes a head's lines would take most ways of their sets in the
// first-level cache.
int64_t slab_of(const PagedTensor& pool) {
  const int64_t slot_bytes = larger(1, pool.slot_stride * pool.element_bytes);  // 0: all slots are the same
  return larger(16, smaller(64, kSlabBytes / slot_bytes / 16 * 16));
}

// Calls body(Pool{}) with a value of the pool's type.
template <typename Body>
inline auto with_integers(const PagedTensor& pool, const Body& body) {
  return pool.type == Dtype::int4 ? body(int4{}) : body(int8_t{});
}

int64_t value_vectors(const AttentionArgs& a) {
  return with_integers(a.v, [&](auto pool) { return value_vectors<decltype(pool)>(a.head_dim); });
}

// Packed block: K as [16 keys' group, columns, 64], then V as [four keys' group, vectors, 64].
int64_t column_bytes(const AttentionArgs& a) { return a.head_dim / 4 * 64; }
int64_t packed_k_bytes(const AttentionArgs& a) { return kKeyBlock / 16 * column_bytes(a); }
int64_t packed_bytes(const AttentionArgs& a) { return packed_k_bytes(a) + kKeyBlock / 4 * value_vectors(a) * 64; }

void pack(const AttentionArgs& a, const Rows& rows, int64_t begin, char* packed) {
  const int64_t first = larger(begin, rows.first_key), last = smaller(begin + kKeyBlock, rows.end_key);
  const Places keys(a, a.k, rows.pages, begin, kKeyBlock, first, last);
  const Places values(a, a.v, rows.pages, begin, kKeyBlock, first, last);
  const int64_t k_head = rows.kv_head * a.k.head_stride, v_head = rows.kv_head * a.v.head_stride;
  with_integers(a.k, [&](auto pool) {
    for (int64_t i = 0; i < kKeyBlock; i += 16)
      pack_keys<decltype(pool)>(keys.of + i, k_head, a.k.head_bytes, packed + i / 16 * column_bytes(a));
  });
  with_integers(a.v, [&](auto pool) {
    char* out = packed + packed_k_bytes(a);
    for (int64_t i = 0; i < kKeyBlock; i += 4, out += value_vectors<decltype(pool)>(a.head_dim) * 64)
      pack_values<decltype(pool)>(values.of + i, v_head, a.v.head_bytes, out);
  });
}

// Memory of `rows` rows that are worked on at once.
struct RowScratch {
  float* scores;      // [rows, kKeyBlock]
  char* weights;      // [rows, kWeightBytes]
  int32_t* sums;      // [rows, vectors * 16]
  float* fresh;       // round_up(head_dim, 32), of one row
  int64_t vectors;
  char* end;

  RowScratch(const AttentionArgs& a, int64_t rows, char* from) : vectors(value_vectors(a)) {
    scores = reinterpret_cast<float*>(from);
    weights = reinterpret_cast<char*>(scores + rows * kKeyBlock);
    sums = reinterpret_cast<int32_t*>(weights + rows * kWeightBytes);
    fresh = reinterpret_cast<float*>(sums + rows * vectors * 16);
    end = reinterpret_cast<char*>(fresh + round_up(a.head_dim, 32));
  }

  // The sums of row `r` over a block, as float32 in the order of the dimensions.
  const float* ordered(const AttentionArgs& a, int64_t r, const Weights& weights_of_row) const {
    with_integers(a.v, [&](auto pool) {
      // Weights that are not finite have any sum, which must not overflow an int.
      const int64_t shift = kShift<decltype(pool)> * static_cast<int64_t>(weights_of_row.sum);
      order_sums<decltype(pool)>(
          sums + r * vectors * 16, vectors, static_cast<int32_t>(shift), weights_of_row.unit, fresh);
    });
    return fresh;
  }
};

// The split query of a row.
Query take_query(const AttentionArgs& a, const Rows& rows, int64_t row, char* out) {
  const bf16* const q = static_cast<const bf16*>(a.q) + query_offset(a, rows, row);
  return with_integers(a.k, [&](auto pool) { return split_query<decltype(pool)>(a, q, out); });
}

void tile(const AttentionArgs& a, const Rows& rows, int64_t begin, int64_t end, const char* packed, char* scratch,
          float* partial) {
  const int64_t count = num_rows(rows), dim = a.head_dim, columns = dim / 4, q_stride = query_bytes(dim);
  const RowScratch at(a, kStrip, scratch);
  float* const acc = reinterpret_cast<float*>(at.end);
  char* const q = reinterpret_cast<char*>(acc + kTileRows * dim);
  char* const own = q + kTileRows * q_stride;
  RowSums sums[kTileRows];
  Query queries[kTileRows];
  for (int64_t r = 0; r < count; ++r) {
    queries[r] = take_query(a, rows, rows.row_begin + r, q + r * q_stride);
    sums[r].sums = acc + r * dim;
  }
  std::memset(acc, 0, count * dim * sizeof(float));
  for (int64_t block = begin / kKeyBlock * kKeyBlock; block < end; block += kKeyBlock) {
    if (packed == nullptr) pack(a, rows, block, own);
    const char* const k = packed == nullptr ? own : packed;
    const char* const v = k + packed_k_bytes(a);
    if (packed != nullptr) packed += packed_bytes(a);
    float key_scales[kScaleFloats];
    const BlockScales scales = gather_scales(a, rows, block, larger(block, rows.first_key),
                                             smaller(block + kKeyBlock, rows.end_key), key_scales);
    for (int64_t strip = 0; strip < count; strip += kStrip) {
      const int64_t num = smaller(kStrip, count - strip);
      // The strip's last row sees the most keys; the strip's work ends where these end.
      const int64_t seen =
          smaller(smaller(end, block + kKeyBlock), position(a, rows, rows.row_begin + strip + num - 1) + 1);
      if (seen <= block) continue;
      const int64_t width = round_up(seen - block, 32);
      for (int64_t key = 0; key < width; key += 16)
        in_groups(num, [&](int64_t r, auto group) {
          const char* const of_keys = k + key / 16 * column_bytes(a);
          score_keys<group.value>(
              [&](const auto& use) __attribute__((always_inline)) {
                for (int64_t c = 0; c < columns; ++c) use(_mm512_load_si512(of_keys + 64 * c));
              },
              q + (strip + r) * q_stride, q_stride, queries + strip + r, at.scores + r * kKeyBlock + key);
        });
      Weights weights[kStrip];
      for (int64_t r = 0; r < num; ++r)
        weights[r] = split_weights(a, position(a, rows, rows.row_begin + strip + r), larger(begin, block), seen, block,
                                   width, queries[strip + r].factor, scales, at.scores + r * kKeyBlock,
                                   at.weights + r * kWeightBytes);
      std::memset(at.sums, 0, num * at.vectors * 64);
      in_groups(num, [&](int64_t r, auto group) {
        add_all_values<group.value>(
            [&](int64_t vector, int64_t g, __m512i x[2]) __attribute__((always_inline)) {
              const char* const of_group = v + (g * at.vectors + vector) * 64;
              x[0] = _mm512_load_si512(of_group);
              x[1] = vector + 1 < at.vectors ? _mm512_load_si512(of_group + 64) : x[0];
            },
            width / 4, at.vectors, at.weights + r * kWeightBytes, at.sums + r * at.vectors * 16, at.vectors * 16);
      });
      for (int64_t r = 0; r < num; ++r)
        add_block(sums[strip + r], at.ordered(a, r, weights[r]), weights[r].top, weights[r].total, dim);
    }
  }
  for (int64_t r = 0; r < count; ++r)
    finish_row(a, rows, rows.row_begin + r, sums[r].sums, sums[r].top, sums[r].total, partial);
}

// Of direct(): the split queries of the rows of all heads.
struct DirectScratch {
  RowScratch rows;
  char* q;
  Query* queries;
  Weights* weights;
  char* end;

  DirectScratch(const AttentionArgs& a, int64_t count, char* from) : rows(a, count, from) {
    q = rows.end;
    queries = reinterpret_cast<Query*>(q + count * query_bytes(a.head_dim));
    weights = reinterpret_cast<Weights*>(queries + count);
    end = reinterpret_cast<char*>(weights + count);
  }
};

// Scores of `rows` rows from `first` on over the 16 keys at `keys`, their head at `shift`.
template <typename Pool>
void score_sixteen(const AttentionArgs& a, const char* const* keys, int64_t shift, int64_t first, int64_t rows,
                   const DirectScratch& at, float* scores) {
  const int64_t q_stride = query_bytes(a.head_dim);
  // Columns are multiplied as they come: packing and products use other parts of the CPU.
  in_groups(rows, [&](int64_t r, auto group) {
    score_keys<group.value>(
        [&](const auto& use) __attribute__((always_inline)) { take_columns<Pool>(keys, shift, a.k.head_bytes, use); },
        at.q + (first + r) * q_stride, q_stride, at.queries + first + r, scores + r * kKeyBlock);
  });
}

// Adds the `count` values at `values` by the weights of `rows` rows from `first` on; asks for as many of the stream.
template <typename Pool>
void weigh_slab(const AttentionArgs& a, const char* const* values, int64_t shift, int64_t slab, int64_t count,
                int64_t first, int64_t rows, const DirectScratch& at, Stream& stream) {
  const int64_t vectors = at.rows.vectors;
  in_groups(rows, [&](int64_t r, auto group) {
    add_all_values<group.value>(
        [&](int64_t vector, int64_t g, __m512i x[2]) __attribute__((always_inline)) {
          if (vector == 0 && r == 0) stream.fetch(4);
          const int64_t b = vector / 2 * kTaken<Pool>;
          take_values<Pool>(values + 4 * g, shift + b, a.v.head_bytes - b, x);
        },
        count / 4, vectors, at.rows.weights + (first + r) * kWeightBytes + 2 * slab,
        at.rows.sums + (first + r) * vectors * 16, vectors * 16);
  });
}

void direct(const AttentionArgs& a, const DirectWork& work, const DirectWork* next, char* scratch) {
  const int64_t base = work.begin / kStep * kStep, padded = round_up(work.end - base, kStep), dim = a.head_dim;
  const int64_t rows = num_rows(work.heads[0]), all = rows * work.count;
  const DirectScratch at(a, all, scratch);
  Ahead ahead;
  if (next != nullptr) {
    if (shares_lines(a.k)) ahead.add(a, a.k, *next);
    if (shares_lines(a.v)) ahead.add(a, a.v, *next);
    ahead.add(a, a.k_scales, *next);
    ahead.add(a, a.v_scales, *next);
  }
  const int64_t lines_at_once = ahead.lines() / (work.count * padded / 16) + 1;
  const Places keys(a, a.k, work.heads[0].pages, base, padded, work.begin, work.end);
  const Places values(a, a.v, work.heads[0].pages, base, padded, work.begin, work.end);
  const int64_t k_slab = slab_of(a.k), v_slab = slab_of(a.v);
  Stream stream(a, work, keys, values, padded, k_slab, v_slab, shares_lines(a.k), shares_lines(a.v));

  for (int64_t r = 0; r < all; ++r) {
    const Rows& head = work.heads[r / rows];
    at.queries[r] = take_query(a, head, head.row_begin + r % rows, at.q + r * query_bytes(dim));
  }
  with_integers(a.k, [&](auto pool) {
    for (int64_t slab = 0; slab < padded; slab += k_slab)
      for (int64_t h = 0; h < work.count; ++h)
        for (int64_t key = slab; key < smaller(slab + k_slab, padded); key += 16) {
          stream.fetch(16);
          ahead.fetch(lines_at_once);
          score_sixteen<decltype(pool)>(a, keys.of + key, work.heads[h].kv_head * a.k.head_stride, h * rows, rows, at,
                                        at.rows.scores + h * rows * kKeyBlock + key);
        }
  });

  float key_scales[kScaleFloats];
  BlockScales scales;
  for (int64_t r = 0; r < all; ++r) {
    const Rows& head = work.heads[r / rows];
    if (r % rows == 0) scales = gather_scales(a, head, base, work.begin, work.end, key_scales);
    at.weights[r] = split_weights(a, position(a, head, head.row_begin + r % rows), work.begin, work.end, base, padded,
                                  at.queries[r].factor, scales, at.rows.scores + r * kKeyBlock,
                                  at.rows.weights + r * kWeightBytes);
  }

  std::memset(at.rows.sums, 0, all * at.rows.vectors * 64);
  with_integers(a.v, [&](auto pool) {
    for (int64_t slab = 0; slab < padded; slab += v_slab)
      for (int64_t h = 0; h < work.count; ++h)
        weigh_slab<decltype(pool)>(a, values.of + slab, work.heads[h].kv_head * a.v.head_stride, slab,
                                   smaller(v_slab, padded - slab), h * rows, rows, at, stream);
  });
  for (int64_t r = 0; r < all; ++r) {
    const Rows& head = work.heads[r / rows];
    float* const partial = head.partial == nullptr ? nullptr : head.partial + work.split * rows * (dim + 2);
    finish_row(a, head, head.row_begin + r % rows, at.rows.ordered(a, r, at.weights[r]), at.weights[r].top,
               at.weights[r].total, partial);
  }
}

int64_t scratch_bytes(const AttentionArgs& a, int64_t rows) {
  const RowScratch of_tile(a, kStrip, nullptr);
  const int64_t tile_bytes = reinterpret_cast<intptr_t>(of_tile.end) +
      kTileRows * (a.head_dim * 4 + query_bytes(a.head_dim)) + packed_bytes(a);
  return larger(tile_bytes, reinterpret_cast<intptr_t>(DirectScratch(a, rows, nullptr).end));
}

}  // namespace

namespace isa_avx512_bf16 {

extern const AttentionKernel vnni_kernel = {packed_bytes, scratch_bytes, pack, tile, direct, merge_blocks, true};

}  // namespace isa_avx512_bf16
}  // namespace kvforge
