// The direct part of the bfloat16 kernel on AVX512-BF16: with few rows per key, keys are read once, in memory
// order, and not packed.
#include "paged_attention/cpu_bf16.h"
#include "paged_attention/cpu_bf16_vectors.h"
#include "paged_attention/cpu_groups.h"
#include "paged_attention/cpu_stream.h"

namespace kvforge {
namespace {

// Keys, and values, of which all heads are worked on in turn: 8 KV heads of 128 are 2 KiB apart from key to key, so that
// of more keys a head's lines would take most ways of their sets in the first-level cache.
constexpr int64_t kSlab = 8;
constexpr int64_t kValueSlab = 16;

// Sums of the 128-bit lanes of four vectors, as one vector.
inline __m512 sum_lanes(__m512 a, __m512 b, __m512 c, __m512 d) {
  const auto halve = [](__m512 x, __m512 y) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd));
  };
  return halve(halve(a, b), halve(c, d));
}

// scores[row, 0 .. 8) of Rows rows of spread queries, q_stride apart.
template <int Rows, bool Whole, typename Pool>
inline void score_keys(const Pool* const keys[8], int64_t dim, const bf16* q, int64_t q_stride, float* scores) {
  __m512 acc[Rows][2];
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) acc[r][0] = acc[r][1] = _mm512_setzero_ps();
  for (int64_t d = 0; d < dim; d += kLoad<Pool>, q += kParts<Pool> * 32) {
    __m512i x[2][kParts<Pool>];
    load_keys<Whole>(keys, d, dim, x[0]);
    load_keys<Whole>(keys + 4, d, dim, x[1]);
#pragma GCC unroll 8
    for (int part = 0; part < kParts<Pool>; ++part)
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) {
        const __m512bh query = reinterpret_cast<__m512bh>(_mm512_loadu_si512(q + r * q_stride + part * 32));
        acc[r][0] = _mm512_dpbf16_ps(acc[r][0], query, reinterpret_cast<__m512bh>(x[0][part]));
        acc[r][1] = _mm512_dpbf16_ps(acc[r][1], query, reinterpret_cast<__m512bh>(x[1][part]));
      }
  }
#pragma GCC unroll 4
  for (int r = 0; r < Rows; r += 2) {
    const int next = r + 1 < Rows ? r + 1 : r;
    const __m512 sums = sum_lanes(acc[r][0], acc[r][1], acc[next][0], acc[next][1]);
    _mm256_storeu_ps(scores + r * kKeyBlock, _mm512_castps512_ps256(sums));
    if (next != r) _mm256_storeu_ps(scores + next * kKeyBlock, _mm512_extractf32x8_ps(sums, 1));
  }
}

// sums[row, 0 .. 64) += weights[row, i] * value i, over `count` (even) values and Rows rows.
template <int Rows, bool Whole, typename Pool>
inline void add_values(const Pool* const* values, int64_t count, int64_t d, int64_t dim, const bf16* weights,
                       float* sums, int64_t sums_stride) {
  __m512 acc[Rows][4];
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) acc[r][v] = _mm512_loadu_ps(sums + r * sums_stride + v * 16);
  for (int64_t i = 0; i < count; i += 2) {
    __m512i x[4];
    load_values<Whole>(values[i], values[i + 1], d, dim, x);
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      int32_t pair;
      std::memcpy(&pair, weights + r * kKeyBlock + i, sizeof pair);
      const __m512bh weight = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) acc[r][v] = _mm512_dpbf16_ps(acc[r][v], reinterpret_cast<__m512bh>(x[v]), weight);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) _mm512_storeu_ps(sums + r * sums_stride + v * 16, acc[r][v]);
}

template <typename Pool>
int64_t spread_size(int64_t dim) {
  return round_up(dim, kLoad<Pool>) * 4;
}

template <typename Pool, bool Whole>
void direct_block(const AttentionArgs& a, const DirectWork& work, char* scratch) {
  const auto [heads, count, begin, end, split] = work;
  const int64_t rows = num_rows(heads[0]), all = rows * count, dim = a.head_dim;
  const int64_t base = begin / 16 * 16, keys = end - base;  // those before `begin` are not seen
  const int64_t columns = (dim + 63) / 64, q_size = spread_size<Pool>(dim);
  bf16* q = reinterpret_cast<bf16*>(scratch);
  float* sums = reinterpret_cast<float*>(q + all * q_size);
  float* scores = sums + all * columns * 64;
  bf16* weights = reinterpret_cast<bf16*>(scores + all * kKeyBlock);
  float* top = reinterpret_cast<float*>(weights + all * kKeyBlock);
  float* total = top + all;

  const int64_t padded = round_up(keys, 8);
  const Places k_places(a, a.k, heads[0].pages, base, padded, begin, end);
  const Places v_places(a, a.v, heads[0].pages, base, padded, begin, end);
  Stream stream(a, work, k_places, v_places, padded, kSlab, kValueSlab);
  const auto place = [](const Places& places, int64_t i) { return reinterpret_cast<const Pool*>(places.of[i]); };

  for (int64_t r = 0; r < all; ++r) {
    const Rows& head = heads[r / rows];
    const bf16* from = static_cast<const bf16*>(a.q) + query_offset(a, head, head.row_begin + r % rows);
    spread_query<Pool>(from, dim, q + r * q_size);
  }
  std::memset(sums, 0, all * columns * 64 * sizeof(float));

  for (int64_t slab = 0; slab < padded; slab += kSlab)
    for (int64_t h = 0; h < count; ++h) {
      const int64_t kv_head = heads[h].kv_head, stop = smaller(slab + kSlab, padded);
      for (int64_t key = slab; key < stop; key += 8) {
        stream.fetch(8);
        const Pool* k[8];
        for (int64_t i = 0; i < 8; ++i) k[i] = place(k_places, key + i) + kv_head * a.k.head_stride;
        in_groups(rows, [&](int64_t r, auto group) {
          score_keys<group.value, Whole>(k, dim, q + (h * rows + r) * q_size, q_size,
                                  scores + (h * rows + r) * kKeyBlock + key);
        });
      }
    }

  float key_scales[kScaleFloats];
  BlockScales scales;
  for (int64_t r = 0; r < all; ++r) {
    const Rows& head = heads[r / rows];
    if (r % rows == 0) scales = gather_scales(a, head, base, begin, end, key_scales);
    int64_t first, last;
    visible_keys(a, position(a, head, head.row_begin + r % rows), begin, end, &first, &last);
    top[r] = -__builtin_inff();
    total[r] = 0;
    if (first < last)
      total[r] = softmax_row(a, scores + r * kKeyBlock, weights + r * kKeyBlock, round_up(keys, 16), first - base,
                             last - base, scales, &top[r]);
    else
      std::memset(weights + r * kKeyBlock, 0, kKeyBlock * sizeof(bf16));
  }

  for (int64_t slab = 0; slab < padded; slab += kValueSlab)
    for (int64_t h = 0; h < count; ++h) {
      const int64_t kv_head = heads[h].kv_head, num = smaller(kValueSlab, padded - slab);
      stream.fetch(num);
      const Pool* v[kValueSlab];
      for (int64_t i = 0; i < num; ++i) v[i] = place(v_places, slab + i) + kv_head * a.v.head_stride;
      for (int64_t d = 0; d < dim; d += 64)
        in_groups(rows, [&](int64_t r, auto group) {
          add_values<group.value, Whole>(v, num, d, dim, weights + (h * rows + r) * kKeyBlock + slab,
                                  sums + (h * rows + r) * columns * 64 + d, columns * 64);
        });
    }

  for (int64_t r = 0; r < all; ++r) {
    const Rows& head = heads[r / rows];
    float* partial = head.partial == nullptr ? nullptr : head.partial + split * rows * (dim + 2);
    float* ordered = scores;
    order_sums<Pool>(sums + r * columns * 64, columns, ordered);
    finish_row(a, head, head.row_begin + r % rows, ordered, top[r], total[r], partial);
  }
}

template <typename Pool>
void direct_block(const AttentionArgs& a, const DirectWork& work, char* scratch) {
  if (a.head_dim % 64 == 0) direct_block<Pool, true>(a, work, scratch);
  else direct_block<Pool, false>(a, work, scratch);
}

}  // namespace

namespace isa_avx512_bf16 {

int64_t bf16_direct_scratch_bytes(const AttentionArgs& a, int64_t rows) {
  const int64_t q_size = a.k.type == Dtype::bfloat16 ? spread_size<bf16>(a.head_dim) : spread_size<fp8>(a.head_dim);
  return rows * (kKeyBlock * (4 + 2) + q_size * 2 + round_up(a.head_dim, 64) * 4 + 2 * 4);
}

void bf16_direct(const AttentionArgs& a, const DirectWork& work, const DirectWork*, char* scratch) {
  with_floats(a.k, [&](auto pool) { direct_block<decltype(pool)>(a, work, scratch); });
}

}  // namespace isa_avx512_bf16
}  // namespace kvforge
