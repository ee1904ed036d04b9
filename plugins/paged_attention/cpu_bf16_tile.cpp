// The tiles of the bfloat16 kernel on AVX512-BF16: K and V are packed for a matrix product whose right side
// comes in pairs of its depth. (ATen's brgemm, at 32 rows, was no faster here.)
#include "paged_attention/cpu_bf16.h"
#include "paged_attention/cpu_bf16_vectors.h"
#include "paged_attention/cpu_groups.h"
#include "paged_attention/cpu_transpose.h"

namespace kvforge {
namespace {

constexpr int64_t kStrip = 16;  // rows of a tile that are worked on at once

// acc[Rows, Vectors] += A B for one pair of the depth, with B in pairs of it.
template <int Rows, int Vectors>
inline __attribute__((always_inline)) void add_pair(__m512 (&acc)[Rows][Vectors], const bf16* a, int64_t lda,
                                                    const bf16* b) {
  __m512bh right[Vectors];
#pragma GCC unroll 4
  for (int j = 0; j < Vectors; ++j) right[j] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(b + j * 32));
#pragma GCC unroll 16
  for (int i = 0; i < Rows; ++i) {
    int32_t pair;
    std::memcpy(&pair, a + i * lda, sizeof pair);
    const __m512bh left = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) acc[i][j] = _mm512_dpbf16_ps(acc[i][j], left, right[j]);
  }
}

template <int Rows, int Vectors, typename Value>
inline __attribute__((always_inline)) void for_each(const Value& value) {
#pragma GCC unroll 16
  for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) value(i, j);
}

// C[Rows, Vectors * 16] = A B, with A [., depth] and B in pairs of its depth: [depth / 2, ldb, 2]. Each element is summed in
// the order of the depth, whatever the shape.
template <int Rows, int Vectors>
inline void multiply(int64_t depth, const bf16* a, int64_t lda, const bf16* b, int64_t ldb, float* c, int64_t ldc) {
  __m512 acc[Rows][Vectors];
  for_each<Rows, Vectors>([&](int i, int j) { acc[i][j] = _mm512_setzero_ps(); });
  for (int64_t k = 0; k < depth; k += 2) add_pair(acc, a + k, lda, b + k * ldb);
  for_each<Rows, Vectors>([&](int i, int j) { _mm512_storeu_ps(c + i * ldc + j * 16, acc[i][j]); });
}

// acc[half] of two halves of the depth, whose sums do not wait for each other.
template <int Rows, int Vectors>
inline __attribute__((always_inline)) void add_both(__m512 (&acc)[2][Rows][Vectors], int64_t quarter, const bf16* a,
                                                    int64_t lda, const bf16* b, int64_t ldb) {
  for_each<Rows, Vectors>([&](int i, int j) { acc[0][i][j] = acc[1][i][j] = _mm512_setzero_ps(); });
  for (int64_t k = 0; k < quarter; k += 2)
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) add_pair(acc[half], a + half * quarter + k, lda, b + (half * quarter + k) * ldb);
}

// The same by sums over the four quarters of the depth, added as (0 + 1) + (2 + 3).
template <int Rows, int Vectors>
inline void multiply_quarters(int64_t depth, const bf16* a, int64_t lda, const bf16* b, int64_t ldb, float* c,
                              int64_t ldc) {
  const int64_t quarter = depth / 4;
  __m512 sum[Rows][Vectors], acc[2][Rows][Vectors];
  add_both(acc, quarter, a, lda, b, ldb);
  for_each<Rows, Vectors>([&](int i, int j) { sum[i][j] = _mm512_add_ps(acc[0][i][j], acc[1][i][j]); });
  add_both(acc, quarter, a + 2 * quarter, lda, b + 2 * quarter * ldb, ldb);
  for_each<Rows, Vectors>([&](int i, int j) {
    sum[i][j] = _mm512_add_ps(sum[i][j], _mm512_add_ps(acc[0][i][j], acc[1][i][j]));
    _mm512_storeu_ps(c + i * ldc + j * 16, sum[i][j]);
  });
}

// weights[kStrip, depth] times values: 8 rows by 48 columns of sums are in registers.
void weigh_values(int64_t columns, int64_t depth, const bf16* a, int64_t lda, const bf16* b, int64_t ldb, float* c,
                  int64_t ldc) {
  constexpr int kRows = 8;
  int64_t j = 0;
  const auto columns_of = [&](auto vectors) {
    for (int64_t i = 0; i < kStrip; i += kRows)
      multiply<kRows, vectors.value>(depth, a + i * lda, lda, b + 2 * j, ldb, c + i * ldc + j, ldc);
    j += 16 * vectors.value;
  };
  while (j < columns) {
    const int64_t vectors = (columns - j) / 16;
    if (vectors >= 3 && vectors != 4) columns_of(std::integral_constant<int, 3>());
    else if (vectors >= 2) columns_of(std::integral_constant<int, 2>());
    else columns_of(std::integral_constant<int, 1>());
  }
}

// Queries [kStrip, depth] times keys: three times 4 rows by 32 columns of sums are in registers.
void score_keys(int64_t columns, int64_t depth, const bf16* a, int64_t lda, const bf16* b, int64_t ldb, float* c,
                int64_t ldc) {
  constexpr int kRows = 4;
  int64_t j = 0;
  for (; j + 32 <= columns; j += 32)
    for (int64_t i = 0; i < kStrip; i += kRows)
      multiply_quarters<kRows, 2>(depth, a + i * lda, lda, b + 2 * j, ldb, c + i * ldc + j, ldc);
  if (j < columns)
    for (int64_t i = 0; i < kStrip; i += kRows)
      multiply_quarters<kRows, 1>(depth, a + i * lda, lda, b + 2 * j, ldb, c + i * ldc + j, ldc);
}

// head_dim as the direct part loads it, with zeros at its end.
template <typename Pool>
int64_t padded_dim(int64_t dim) {
  return round_up(dim, kLoad<Pool>);
}

int64_t padded_dim(const AttentionArgs& a) {
  return a.k.type == Dtype::bfloat16 ? padded_dim<bf16>(a.head_dim) : padded_dim<fp8>(a.head_dim);
}

// Where the pair of dimensions at d is in the depth of the scores: first all pairs that load_keys() puts into lane
// 0, in its order, then those of lane 1, 2 and 3. Each quarter of the depth has a sum of its own.
template <typename Pool>
int64_t place_of_pair(int64_t d, int64_t padded) {
  constexpr int64_t kOfLane = kLoad<Pool> / 4;
  return d % kLoad<Pool> / kOfLane * (padded / 8) + d / kLoad<Pool> * kParts<Pool> + d % kOfLane / 2;
}

template <typename Pool>
void order_query(const bf16* q, int64_t dim, bf16* out) {
  const int64_t padded = padded_dim<Pool>(dim);
  for (int64_t d = 0; d < padded; d += 2) {
    const uint32_t pair = query_pair(q, d, dim);
    std::memcpy(out + 2 * place_of_pair<Pool>(d, padded), &pair, sizeof pair);
  }
}

template <typename Pool>
void pack_block(const AttentionArgs& a, const Rows& rows, int64_t begin, bf16* k_out, bf16* v_out) {
  const int64_t first = larger(begin, rows.first_key), last = smaller(begin + kKeyBlock, rows.end_key);
  int64_t k_offset[kKeyBlock], v_offset[kKeyBlock];
  key_offsets(a, a.k, rows.pages, first, last, k_offset);
  key_offsets(a, a.v, rows.pages, first, last, v_offset);
  const Pool* k = static_cast<const Pool*>(a.k.data) + rows.kv_head * a.k.head_stride;
  const Pool* v = static_cast<const Pool*>(a.v.data) + rows.kv_head * a.v.head_stride;
  const auto needed = [&](int64_t key) { return key >= first && key < last; };
  const int64_t padded = padded_dim<Pool>(a.head_dim);
  for (int64_t key = begin; key < begin + kKeyBlock; key += 16) {
    for (int64_t d = 0; d < padded; d += 32) {
      const __mmask32 mask = d + 32 <= a.head_dim ? 0xffffffffu : d < a.head_dim ? 0xffffu : 0;
      __m512i x[16];
      for (int i = 0; i < 16; ++i)
        x[i] = needed(key + i) ? load_masked(mask, k + k_offset[key + i - first] + d) : _mm512_setzero_si512();
      transpose(x);
      for (int i = 0; i < 16; ++i)
        _mm512_storeu_si512(k_out + (place_of_pair<Pool>(d + 2 * i, padded) * kKeyBlock + key - begin) * 2, x[i]);
    }
  }
  for (int64_t key = begin; key < begin + kKeyBlock; key += 2) {
    bf16* out = v_out + (key - begin) * a.head_dim;
    for (int64_t d = 0; d < a.head_dim; d += 16) {
      const __m512i even = needed(key) ? load_masked(0xffff, v + v_offset[key - first] + d) : _mm512_setzero_si512();
      const __m512i odd =
          needed(key + 1) ? load_masked(0xffff, v + v_offset[key + 1 - first] + d) : _mm512_setzero_si512();
      _mm512_storeu_si512(out + 2 * d, _mm512_permutex2var_epi16(even, pairs_low(), odd));
    }
  }
}

}  // namespace

namespace isa_avx512_bf16 {

// Packed block: K as [padded_dim / 2, kKeyBlock, 2], then V as [kKeyBlock / 2, head_dim, 2].
int64_t bf16_packed_bytes(const AttentionArgs& a) {
  return kKeyBlock * (padded_dim(a) + a.head_dim) * static_cast<int64_t>(sizeof(bf16));
}

int64_t bf16_tile_scratch_bytes(const AttentionArgs& a) {
  return kTileRows * (padded_dim(a) * 2 + a.head_dim * 4) + kStrip * (kKeyBlock * (2 + 4) + a.head_dim * 4) +
      bf16_packed_bytes(a);
}

void bf16_pack(const AttentionArgs& a, const Rows& rows, int64_t begin, char* packed) {
  bf16* k = reinterpret_cast<bf16*>(packed);
  bf16* v = k + kKeyBlock * padded_dim(a);
  with_floats(a.k, [&](auto pool) { pack_block<decltype(pool)>(a, rows, begin, k, v); });
}

void bf16_tile(const AttentionArgs& a, const Rows& rows, int64_t begin, int64_t end, const char* packed,
               char* scratch, float* partial) {
  const int64_t count = num_rows(rows), padded = round_up(count, kStrip), dim = a.head_dim;
  const int64_t depth = padded_dim(a);
  float* scores = reinterpret_cast<float*>(scratch);  // of one strip
  float* fresh = scores + kStrip * kKeyBlock;  // sums over one block
  float* acc = fresh + kStrip * dim;
  bf16* weights = reinterpret_cast<bf16*>(acc + kTileRows * dim);
  bf16* q = weights + kStrip * kKeyBlock;
  char* own = reinterpret_cast<char*>(q + kTileRows * depth);
  RowSums sums[kTileRows];
  for (int64_t r = 0; r < count; ++r) {
    const int64_t offset = query_offset(a, rows, rows.row_begin + r);
    const bf16* from = static_cast<const bf16*>(a.q) + offset;
    with_floats(a.k, [&](auto pool) { order_query<decltype(pool)>(from, dim, q + r * depth); });
    sums[r].sums = acc + r * dim;
  }
  std::memset(q + count * depth, 0, (padded - count) * depth * sizeof(bf16));
  std::memset(acc, 0, padded * dim * sizeof(float));
  for (int64_t block = begin / kKeyBlock * kKeyBlock; block < end; block += kKeyBlock) {
    if (packed == nullptr) bf16_pack(a, rows, block, own);
    const bf16* k = reinterpret_cast<const bf16*>(packed == nullptr ? own : packed);
    const bf16* v = k + kKeyBlock * depth;
    if (packed != nullptr) packed += bf16_packed_bytes(a);
    float key_scales[kScaleFloats];
    const BlockScales scales = gather_scales(a, rows, block, larger(block, rows.first_key),
                                             smaller(block + kKeyBlock, rows.end_key), key_scales);
    for (int64_t strip = 0; strip < count; strip += kStrip) {
      const int64_t stop = smaller(strip + kStrip, count);
      // The strip's last row sees the most keys; the strip's work ends where these end.
      const int64_t seen = smaller(smaller(end, block + kKeyBlock), position(a, rows, rows.row_begin + stop - 1) + 1);
      if (seen <= block) continue;
      const int64_t width = round_up(seen - block, 16);
      score_keys(width, depth, q + strip * depth, depth, k, kKeyBlock, scores, kKeyBlock);
      float top[kStrip], total[kStrip] = {};
      for (int64_t r = strip; r < strip + kStrip; ++r) {
        bf16* row = weights + (r - strip) * kKeyBlock;
        int64_t first = 0, last = 0;
        if (r < stop)
          visible_keys(a, position(a, rows, rows.row_begin + r), larger(begin, block), seen, &first, &last);
        if (first >= last) {
          std::memset(row, 0, width * sizeof(bf16));
          continue;
        }
        top[r - strip] = -__builtin_inff();
        total[r - strip] = softmax_row(a, scores + (r - strip) * kKeyBlock, row, width, first - block, last - block,
                                       scales, &top[r - strip]);
      }
      weigh_values(dim, width, weights, kKeyBlock, v, dim, fresh, dim);
      for (int64_t r = strip; r < stop; ++r)
        add_block(sums[r], fresh + (r - strip) * dim, top[r - strip], total[r - strip], dim);
    }
  }
  for (int64_t r = 0; r < count; ++r)
    finish_row(a, rows, rows.row_begin + r, sums[r].sums, sums[r].top, sums[r].total, partial);
}

}  // namespace isa_avx512_bf16
}  // namespace kvforge
