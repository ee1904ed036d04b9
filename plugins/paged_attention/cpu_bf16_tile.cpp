// The tiles of the bfloat16 kernel on AVX512-BF16: K and V are packed for a matrix product whose right side
// comes in pairs of its depth. (ATen's brgemm, at 32 rows, was no faster than gemm() here.)
#include "paged_attention/cpu_bf16.h"
#include "paged_attention/cpu_bf16_load.h"

namespace kvforge {
namespace {

constexpr int64_t kStrip = 16;    // rows of a tile that are worked on at once
constexpr int64_t kGemmRows = 8;  // and of these, rows whose sums are held in registers

template <int N>
struct Count {
  static constexpr int value = N;
};

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

template <typename Pool>
void pack_block(const AttentionArgs& a, const Rows& rows, int64_t begin, bf16* k_out, bf16* v_out) {
  const int64_t first = larger(begin, rows.first_key), last = smaller(begin + kKeyBlock, rows.end_key);
  int64_t k_offset[kKeyBlock], v_offset[kKeyBlock];
  key_offsets(a, a.k, rows.pages, first, last, k_offset);
  key_offsets(a, a.v, rows.pages, first, last, v_offset);
  const Pool* k = static_cast<const Pool*>(a.k.data) + rows.kv_head * a.k.head_stride;
  const Pool* v = static_cast<const Pool*>(a.v.data) + rows.kv_head * a.v.head_stride;
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

}  // namespace

namespace isa_avx512 {

// Packed block: K as [head_dim / 2, kKeyBlock, 2], then V as [kKeyBlock / 2, head_dim, 2].
int64_t bf16_packed_bytes(const AttentionArgs& a) { return 2 * kKeyBlock * a.head_dim * sizeof(bf16); }

int64_t bf16_tile_scratch_bytes(const AttentionArgs& a) {
  return kTileRows * a.head_dim * (2 + 4) + kStrip * kKeyBlock * (2 + 4) + bf16_packed_bytes(a);
}

void bf16_pack(const AttentionArgs& a, const Rows& rows, int64_t begin, char* packed) {
  bf16* k = reinterpret_cast<bf16*>(packed);
  bf16* v = k + kKeyBlock * a.head_dim;
  if (a.pool == Dtype::bfloat16) pack_block<bf16>(a, rows, begin, k, v);
  else if (a.pool == Dtype::fp8) pack_block<fp8>(a, rows, begin, k, v);
  else pack_block<int8_t>(a, rows, begin, k, v);
}

void bf16_tile(const AttentionArgs& a, const Rows& rows, int64_t begin, int64_t end, const char* packed,
               char* scratch, float* partial) {
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
    if (packed == nullptr) bf16_pack(a, rows, block, own);
    const bf16* k = reinterpret_cast<const bf16*>(packed == nullptr ? own : packed);
    const bf16* v = k + kKeyBlock * dim;
    if (packed != nullptr) packed += bf16_packed_bytes(a);
    float key_scales[2 * kKeyBlock];
    const BlockScales scales = gather_scales(a, rows, block, larger(block, rows.first_key),
                                             smaller(block + kKeyBlock, rows.end_key), key_scales);
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
        const float fresh = softmax_row(a, scores + (r - strip) * kKeyBlock, row, width, first - block, last - block,
                                        scales, &top[r]);
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

}  // namespace isa_avx512
}  // namespace kvforge
