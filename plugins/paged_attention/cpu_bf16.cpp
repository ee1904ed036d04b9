// The kernel for bfloat16 queries and pools on AVX512-BF16. Compiled for that instruction set, so no inline
// function with external linkage may be used here: the linker could choose it for other files too.
// Exponents are in units of log2(e): exp(x) is computed as 2^(x log2(e)).
#include <immintrin.h>

#include <cstring>

#include "native/cast.h"
#include "paged_attention/cpu_kernel.h"
#include "paged_attention/cpu_rows.h"

namespace kvforge {
namespace {

constexpr float kLog2E = 1.44269504088896341f;
constexpr float kLn2 = 0.693147180559945309f;
constexpr int64_t kStrip = 16;     // rows of a tile that are worked on at once
constexpr int64_t kGemmRows = 8;   // and of these, rows whose sums are held in registers

template <int N>
struct Count {
  static constexpr int value = N;
};
constexpr int64_t kMaxChunks = 8;  // of 32 elements: head_dim up to 256

inline const bf16* elements(const PagedTensor& pool) { return static_cast<const bf16*>(pool.data); }

inline __m512i load_masked(__mmask32 mask, const bf16* p) { return _mm512_maskz_loadu_epi16(mask, p); }

inline __mmask16 lanes_between(int64_t j, int64_t first, int64_t last) {  // lanes i with first <= j + i < last
  const int64_t low = smaller(larger(first - j, 0), 16), high = smaller(larger(last - j, 0), 16);
  return static_cast<__mmask16>((0xffffu << low) & ((1u << high) - 1));
}

// 2^x for x <= 0, relative error below 3e-6 (a bfloat16 weight keeps 4e-3).
inline __m512 exp2_nonpositive(__m512 x) {
  const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(x, n);
  __m512 p = _mm512_set1_ps(9.6181291e-3f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.5504109e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4022651e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9314718e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, n);
}

inline void store_bf16(bf16* p, __m512 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
}

// head_dim is a multiple of 16.
void finish_row(const AttentionArgs& a, const Rows& rows, int64_t row, const float* acc, float top, float total,
                float* partial) {
  if (partial != nullptr) {
    float* target = partial + (row - rows.row_begin) * (a.head_dim + 2);
    std::memcpy(target, acc, a.head_dim * sizeof(float));
    target[a.head_dim] = top * kLn2;
    target[a.head_dim + 1] = total;
    return;
  }
  bf16* out = static_cast<bf16*>(a.out) + token_head(a, rows, row) * a.head_dim;
  const __m512 inverse = _mm512_set1_ps(1.0f / total);
  for (int64_t d = 0; d < a.head_dim; d += 16)
    store_bf16(out + d, _mm512_mul_ps(_mm512_loadu_ps(acc + d), inverse));
}

// weights[0 .. width) = 2^(factor * score - top) for [first, last) and 0 elsewhere, with top the larger of *top
// and the scaled scores; updates *top, returns the float32 sum. width a multiple of 16, first < last. Masked is
// false when every score counts.
template <bool Masked>
inline float softmax_row(const float* scores, bf16* weights, int64_t width, int64_t first, int64_t last,
                         float factor, float* top) {
  const __m512 scale = _mm512_set1_ps(factor);
  __m512 highest = _mm512_set1_ps(*top);
  const int64_t begin = Masked ? first / 16 * 16 : 0, end = Masked ? round_up(last, 16) : width;
  for (int64_t j = begin; j < end; j += 16) {
    const __mmask16 seen = Masked ? lanes_between(j, first, last) : 0xffff;
    const __m512 x = _mm512_mul_ps(_mm512_loadu_ps(scores + j), scale);
    highest = _mm512_mask_max_ps(highest, seen, highest, x);
  }
  *top = _mm512_reduce_max_ps(highest);
  const __m512 peak = _mm512_set1_ps(*top);
  __m512 total = _mm512_setzero_ps();
  for (int64_t j = begin; j < end; j += 16) {
    const __mmask16 seen = Masked ? lanes_between(j, first, last) : 0xffff;
    __m512 p = exp2_nonpositive(_mm512_fmsub_ps(_mm512_loadu_ps(scores + j), scale, peak));
    p = _mm512_maskz_mov_ps(seen, p);
    total = _mm512_add_ps(total, p);
    store_bf16(weights + j, p);
  }
  if (Masked) {
    std::memset(weights, 0, begin * sizeof(bf16));
    std::memset(weights + end, 0, (width - end) * sizeof(bf16));
  }
  return _mm512_reduce_add_ps(total);
}

float softmax_row(const float* scores, bf16* weights, int64_t width, int64_t first, int64_t last, float factor,
                  float* top) {
  if (first == 0 && last == width) return softmax_row<false>(scores, weights, width, first, last, factor, top);
  return softmax_row<true>(scores, weights, width, first, last, factor, top);
}

// --- tiles: K and V packed for a matrix product whose right side comes in pairs of its depth ---

// Packed block: K as [head_dim / 2, kKeyBlock, 2], then V as [kKeyBlock / 2, head_dim, 2].
int64_t packed_bytes(const AttentionArgs& a) { return 2 * kKeyBlock * a.head_dim * sizeof(bf16); }

// Transposes 16 x 16 words: x[i] word j becomes x[j] word i.
inline void transpose(__m512i x[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    x[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    x[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    x[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    x[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i)
    for (int half = 0; half < 16; half += 8) {
      t[half + i] = _mm512_shuffle_i32x4(x[half + i], x[half + i + 4], 0x88);
      t[half + i + 4] = _mm512_shuffle_i32x4(x[half + i], x[half + i + 4], 0xdd);
    }
  for (int i = 0; i < 8; ++i) {
    x[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    x[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
  }
}

// Indices that interleave two vectors of 32: their first halves, their second halves.
inline __m512i pairs_low() {
  return _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4,
                          35, 3, 34, 2, 33, 1, 32, 0);
}

inline __m512i pairs_high() { return _mm512_add_epi16(pairs_low(), _mm512_set1_epi16(16)); }

void pack(const AttentionArgs& a, const Rows& rows, int64_t begin, char* packed) {
  const int64_t first = larger(begin, rows.first_key), last = smaller(begin + kKeyBlock, rows.end_key);
  bf16* k_out = reinterpret_cast<bf16*>(packed);
  bf16* v_out = k_out + kKeyBlock * a.head_dim;
  int64_t k_offset[kKeyBlock], v_offset[kKeyBlock];
  key_offsets(a, a.k, rows.pages, first, last, k_offset);
  key_offsets(a, a.v, rows.pages, first, last, v_offset);
  const bf16* k = elements(a.k) + rows.kv_head * a.k.head_stride;
  const bf16* v = elements(a.v) + rows.kv_head * a.v.head_stride;
  const auto needed = [&](int64_t key) { return key >= first && key < last; };
  for (int64_t key = begin; key < begin + kKeyBlock; key += 16) {
    for (int64_t d = 0; d < a.head_dim; d += 32) {
      const bool whole = d + 32 <= a.head_dim;
      __m512i x[16];
      for (int i = 0; i < 16; ++i)
        x[i] = needed(key + i) ? load_masked(whole ? 0xffffffffu : 0xffffu, k + k_offset[key + i - first] + d)
                               : _mm512_setzero_si512();
      transpose(x);
      for (int i = 0; i < (whole ? 16 : 8); ++i)
        _mm512_storeu_si512(k_out + ((d / 2 + i) * kKeyBlock + key - begin) * 2, x[i]);
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

// C[kGemmRows, Vectors * 16] (+)= A B, with A [., depth] and B in pairs of its depth: [depth / 2, ldb, 2]. Each
// element is summed in the order of the depth, whatever the shape.
template <int Vectors>
void gemm_block(int64_t depth, const bf16* a, int64_t lda, const bf16* b, int64_t ldb, float* c, int64_t ldc,
                bool add) {
  __m512 acc[kGemmRows][Vectors];
#pragma GCC unroll 16
  for (int i = 0; i < kGemmRows; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) acc[i][j] = add ? _mm512_loadu_ps(c + i * ldc + j * 16) : _mm512_setzero_ps();
  for (int64_t k = 0; k < depth; k += 2) {
    __m512bh right[Vectors];
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j)
      right[j] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(b + k * ldb + j * 32));
#pragma GCC unroll 16
    for (int i = 0; i < kGemmRows; ++i) {
      int32_t pair;
      std::memcpy(&pair, a + i * lda + k, sizeof pair);
      const __m512bh left = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
#pragma GCC unroll 4
      for (int j = 0; j < Vectors; ++j) acc[i][j] = _mm512_dpbf16_ps(acc[i][j], left, right[j]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kGemmRows; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) _mm512_storeu_ps(c + i * ldc + j * 16, acc[i][j]);
}

// C[kStrip, columns] (+)= A B; columns a multiple of 16.
void gemm(int64_t columns, int64_t depth, const bf16* a, int64_t lda, const bf16* b, int64_t ldb, float* c,
          int64_t ldc, bool add) {
  int64_t j = 0;
  const auto columns_of = [&](auto vectors) {
    for (int64_t i = 0; i < kStrip; i += kGemmRows)
      gemm_block<vectors.value>(depth, a + i * lda, lda, b + 2 * j, ldb, c + i * ldc + j, ldc, add);
    j += 16 * vectors.value;
  };
  while (j < columns) {
    const int64_t vectors = (columns - j) / 16;
    if (vectors >= 3 && vectors != 4) columns_of(Count<3>());
    else if (vectors >= 2) columns_of(Count<2>());
    else columns_of(Count<1>());
  }
}

int64_t scratch_bytes(const AttentionArgs& a, int64_t rows) {
  const int64_t tile = kTileRows * a.head_dim * (2 + 4) + kStrip * kKeyBlock * (2 + 4) + packed_bytes(a);
  const int64_t direct = rows * (kKeyBlock * (4 + 2) + round_up(a.head_dim, 32) * (2 + 4) + 2 * 4);
  return larger(tile, direct);
}

void tile(const AttentionArgs& a, const Rows& rows, int64_t begin, int64_t end, const char* packed, char* scratch,
          float* partial) {
  const int64_t count = num_rows(rows), padded = round_up(count, kStrip), dim = a.head_dim;
  float* scores = reinterpret_cast<float*>(scratch);  // of one strip
  float* acc = scores + kStrip * kKeyBlock;
  bf16* weights = reinterpret_cast<bf16*>(acc + kTileRows * dim);
  bf16* q = weights + kStrip * kKeyBlock;
  char* own = reinterpret_cast<char*>(q + kTileRows * dim);
  float top[kTileRows], total[kTileRows];
  for (int64_t r = 0; r < count; ++r) {
    const int64_t offset = query_offset(a, rows, rows.row_begin + r);
    std::memcpy(q + r * dim, static_cast<const bf16*>(a.q) + offset, dim * sizeof(bf16));
    top[r] = -__builtin_inff();
    total[r] = 0;
  }
  std::memset(q + count * dim, 0, (padded - count) * dim * sizeof(bf16));
  std::memset(acc, 0, padded * dim * sizeof(float));
  for (int64_t block = begin / kKeyBlock * kKeyBlock; block < end; block += kKeyBlock) {
    if (packed == nullptr) pack(a, rows, block, own);
    const bf16* k = reinterpret_cast<const bf16*>(packed == nullptr ? own : packed);
    const bf16* v = k + kKeyBlock * dim;
    if (packed != nullptr) packed += packed_bytes(a);
    for (int64_t strip = 0; strip < count; strip += kStrip) {
      const int64_t stop = smaller(strip + kStrip, count);
      // The strip's last row sees the most keys; the strip's work ends where these end.
      const int64_t seen = smaller(smaller(end, block + kKeyBlock), position(a, rows, rows.row_begin + stop - 1) + 1);
      if (seen <= block) continue;
      const int64_t width = round_up(seen - block, 16);
      gemm(width, dim, q + strip * dim, dim, k, kKeyBlock, scores, kKeyBlock, false);
      for (int64_t r = strip; r < strip + kStrip; ++r) {
        bf16* row = weights + (r - strip) * kKeyBlock;
        int64_t first = 0, last = 0;
        if (r < stop)
          visible_keys(a, position(a, rows, rows.row_begin + r), larger(begin, block), seen, &first, &last);
        if (first >= last) {
          std::memset(row, 0, width * sizeof(bf16));
          continue;
        }
        const float before = top[r];
        const float fresh = softmax_row(scores + (r - strip) * kKeyBlock, row, width, first - block, last - block,
                                        a.scale * kLog2E, &top[r]);
        if (top[r] == before) {
          total[r] += fresh;
          continue;
        }
        const __m512 shrink = _mm512_set1_ps(__builtin_exp2f(before - top[r]));
        total[r] = total[r] * _mm512_cvtss_f32(shrink) + fresh;
        for (int64_t d = 0; d < dim; d += 16)
          _mm512_storeu_ps(acc + r * dim + d, _mm512_mul_ps(_mm512_loadu_ps(acc + r * dim + d), shrink));
      }
      gemm(dim, width, weights, kKeyBlock, v, dim, acc + strip * dim, dim, true);
    }
  }
  for (int64_t r = 0; r < count; ++r)
    finish_row(a, rows, rows.row_begin + r, acc + r * dim, top[r], total[r], partial);
}

// --- direct: few rows per key, so keys are read once, in memory order, and not packed ---

// Sums of 16 vectors, as one vector.
inline __m512 sums(const __m512 x[16]) {
  __m512 t[8], u[4];
  for (int i = 0; i < 8; ++i)
    t[i] = _mm512_add_ps(_mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]), _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]));
  for (int i = 0; i < 4; ++i) {
    const __m512d a = _mm512_castps_pd(t[2 * i]), b = _mm512_castps_pd(t[2 * i + 1]);
    u[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  __m512 w[2];
  for (int i = 0; i < 2; ++i)
    w[i] = _mm512_add_ps(_mm512_shuffle_f32x4(u[2 * i], u[2 * i + 1], 0x88),
                         _mm512_shuffle_f32x4(u[2 * i], u[2 * i + 1], 0xdd));
  return _mm512_add_ps(_mm512_shuffle_f32x4(w[0], w[1], 0x88), _mm512_shuffle_f32x4(w[0], w[1], 0xdd));
}

// Addresses of keys [key, key + 16) of a block of `keys`, the last one repeated past its end.
inline void gather(const bf16* head, const int64_t* offsets, int64_t key, int64_t keys, const bf16* rows[16]) {
  for (int64_t i = 0; i < 16; ++i) rows[i] = head + offsets[smaller(key + i, keys - 1)];
}

// scores[row, 0 .. 16) for `rows` rows of q, [rows, Chunks * 32] padded with zeros.
template <int Chunks>
inline void score_keys(const bf16* const keys[16], const bf16* q, int64_t rows, __mmask32 tail, float* scores) {
  for (int64_t r = 0; r < rows; ++r) {
    __m512bh query[Chunks];
#pragma GCC unroll 8
    for (int c = 0; c < Chunks; ++c)
      query[c] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(q + (r * Chunks + c) * 32));
    __m512 acc[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      acc[i] = _mm512_setzero_ps();
#pragma GCC unroll 8
      for (int c = 0; c < Chunks; ++c) {
        const __m512i key = c + 1 < Chunks ? _mm512_loadu_si512(keys[i] + 32 * c) : load_masked(tail, keys[i] + 32 * c);
        acc[i] = _mm512_dpbf16_ps(acc[i], query[c], reinterpret_cast<__m512bh>(key));
      }
    }
    _mm512_storeu_ps(scores + r * kKeyBlock, sums(acc));
  }
}

// Interleaves 16 values in pairs of keys, as pack() does: out is [8, Chunks * 32, 2].
template <int Chunks>
inline void pair_values(const bf16* const values[16], __mmask32 tail, bf16* out) {
  for (int64_t i = 0; i < 16; i += 2)
#pragma GCC unroll 8
    for (int c = 0; c < Chunks; ++c, out += 64) {
      const __mmask32 mask = c + 1 < Chunks ? 0xffffffffu : tail;
      const __m512i even = load_masked(mask, values[i] + 32 * c), odd = load_masked(mask, values[i + 1] + 32 * c);
      _mm512_storeu_si512(out, _mm512_permutex2var_epi16(even, pairs_low(), odd));
      _mm512_storeu_si512(out + 32, _mm512_permutex2var_epi16(even, pairs_high(), odd));
    }
}

// acc[r] += sum over 16 keys of weights[r][i] * values[i], for RowsAtOnce rows.
template <int Chunks, int RowsAtOnce>
inline void add_values(const bf16* pairs, const bf16* weights, float* acc) {
  __m512 sum[RowsAtOnce][2 * Chunks];
#pragma GCC unroll 4
  for (int r = 0; r < RowsAtOnce; ++r)
#pragma GCC unroll 16
    for (int c = 0; c < 2 * Chunks; ++c) sum[r][c] = _mm512_loadu_ps(acc + (r * 2 * Chunks + c) * 16);
  for (int64_t i = 0; i < 16; i += 2, pairs += Chunks * 64) {
    __m512bh weight[RowsAtOnce];
#pragma GCC unroll 4
    for (int r = 0; r < RowsAtOnce; ++r) {
      int32_t pair;
      std::memcpy(&pair, weights + r * kKeyBlock + i, sizeof pair);
      weight[r] = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
    }
#pragma GCC unroll 16
    for (int c = 0; c < 2 * Chunks; ++c) {
      const __m512bh value = reinterpret_cast<__m512bh>(_mm512_loadu_si512(pairs + c * 32));
#pragma GCC unroll 4
      for (int r = 0; r < RowsAtOnce; ++r) sum[r][c] = _mm512_dpbf16_ps(sum[r][c], value, weight[r]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < RowsAtOnce; ++r)
#pragma GCC unroll 16
    for (int c = 0; c < 2 * Chunks; ++c) _mm512_storeu_ps(acc + (r * 2 * Chunks + c) * 16, sum[r][c]);
}

template <int Chunks>
void direct_block(const AttentionArgs& a, const Rows* heads, int64_t count, int64_t begin, int64_t end,
                  int64_t split, char* scratch) {
  constexpr int kRowsAtOnce = Chunks <= 2 ? 4 : Chunks <= 4 ? 2 : 1;
  constexpr int64_t kDim = Chunks * 32;
  const int64_t rows = num_rows(heads[0]), all = rows * count, keys = end - begin;
  const __mmask32 tail = a.head_dim % 32 == 0 ? 0xffffffffu : 0xffffu;
  float* scores = reinterpret_cast<float*>(scratch);
  float* acc = scores + all * kKeyBlock;
  float* top = acc + all * kDim;
  float* total = top + all;
  bf16* weights = reinterpret_cast<bf16*>(total + all);
  bf16* q = weights + all * kKeyBlock;
  int64_t k_offset[kKeyBlock], v_offset[kKeyBlock];
  key_offsets(a, a.k, heads[0].pages, begin, end, k_offset);
  key_offsets(a, a.v, heads[0].pages, begin, end, v_offset);
  std::memset(acc, 0, all * kDim * sizeof(float));
  std::memset(q, 0, all * kDim * sizeof(bf16));
  for (int64_t r = 0; r < all; ++r) {
    const Rows& head = heads[r / rows];
    const int64_t offset = query_offset(a, head, head.row_begin + r % rows);
    std::memcpy(q + r * kDim, static_cast<const bf16*>(a.q) + offset, a.head_dim * sizeof(bf16));
  }
  for (int64_t key = 0; key < keys; key += 16)
    for (int64_t h = 0; h < count; ++h) {
      const bf16* k[16];  // past the last key masked below
      gather(elements(a.k) + heads[h].kv_head * a.k.head_stride, k_offset, key, keys, k);
      score_keys<Chunks>(k, q + h * rows * kDim, rows, tail, scores + h * rows * kKeyBlock + key);
    }
  for (int64_t r = 0; r < all; ++r) {
    const Rows& head = heads[r / rows];
    int64_t first, last;
    visible_keys(a, position(a, head, head.row_begin + r % rows), begin, end, &first, &last);
    float* row = scores + r * kKeyBlock;
    top[r] = -__builtin_inff();
    total[r] = 0;
    if (first < last)
      total[r] = softmax_row(row, weights + r * kKeyBlock, round_up(keys, 16), first - begin, last - begin,
                             a.scale * kLog2E, &top[r]);
    else
      std::memset(weights + r * kKeyBlock, 0, kKeyBlock * sizeof(bf16));
  }
  for (int64_t key = 0; key < keys; key += 16)
    for (int64_t h = 0; h < count; ++h) {
      const bf16* v[16];  // past the last key with weight 0
      bf16 pairs[16 * kDim];
      gather(elements(a.v) + heads[h].kv_head * a.v.head_stride, v_offset, key, keys, v);
      pair_values<Chunks>(v, tail, pairs);
      const bf16* row = weights + h * rows * kKeyBlock + key;
      float* target = acc + h * rows * kDim;
      int64_t r = 0;
      for (; r + kRowsAtOnce <= rows; r += kRowsAtOnce)
        add_values<Chunks, kRowsAtOnce>(pairs, row + r * kKeyBlock, target + r * kDim);
      for (; r < rows; ++r) add_values<Chunks, 1>(pairs, row + r * kKeyBlock, target + r * kDim);
    }
  for (int64_t r = 0; r < all; ++r) {
    const Rows& head = heads[r / rows];
    float* partial = head.partial == nullptr ? nullptr : head.partial + split * rows * (a.head_dim + 2);
    finish_row(a, head, head.row_begin + r % rows, acc + r * kDim, top[r], total[r], partial);
  }
}

void direct(const AttentionArgs& a, const Rows* heads, int64_t count, int64_t begin, int64_t end, int64_t split,
            char* scratch) {
  static_assert(kMaxChunks == 8);
  switch ((a.head_dim + 31) / 32) {
    case 1: return direct_block<1>(a, heads, count, begin, end, split, scratch);
    case 2: return direct_block<2>(a, heads, count, begin, end, split, scratch);
    case 3: return direct_block<3>(a, heads, count, begin, end, split, scratch);
    case 4: return direct_block<4>(a, heads, count, begin, end, split, scratch);
    case 5: return direct_block<5>(a, heads, count, begin, end, split, scratch);
    case 6: return direct_block<6>(a, heads, count, begin, end, split, scratch);
    case 7: return direct_block<7>(a, heads, count, begin, end, split, scratch);
    case 8: return direct_block<8>(a, heads, count, begin, end, split, scratch);
  }
}

}  // namespace

namespace isa_avx512 {

extern const AttentionKernel bf16_kernel = {packed_bytes, scratch_bytes, pack, tile, direct};

}  // namespace isa_avx512
}  // namespace kvforge
