// The direct part of the bfloat16 kernel on AVX512-BF16: with few rows per key, keys are read once, in memory
// order, and not packed.
#include "paged_attention/cpu_bf16.h"
#include "paged_attention/cpu_bf16_load.h"

namespace kvforge {
namespace {

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

// Copies of 8-bit vectors in bfloat16, [16, Chunks * 32].
template <int Chunks, typename Pool>
inline void convert(const Pool* head, const int64_t* offsets, int64_t count, __mmask32 tail, bf16* copies) {
  for (int64_t i = 0; i < count; ++i)
#pragma GCC unroll 8
    for (int c = 0; c < Chunks; ++c, copies += 32)
      _mm512_storeu_si512(copies, load_masked(c + 1 < Chunks ? 0xffffffffu : tail, head + offsets[i] + 32 * c));
}

// Addresses of keys [key, key + 16) of a block of `keys` as bfloat16, the last one repeated past its end; of 8-bit
// pools they are copies.
template <int Chunks>
inline void gather(Dtype dtype, const PagedTensor& pool, int64_t kv_head, const int64_t* offsets, int64_t key,
                   int64_t keys, __mmask32 tail, bf16* copies, const bf16* rows[16]) {
  const int64_t count = smaller(16, keys - key);
  const auto head = [&](auto* data) { return data + kv_head * pool.head_stride; };
  offsets += key;
  if (dtype == Dtype::bfloat16) {
    const bf16* data = head(static_cast<const bf16*>(pool.data));
    for (int64_t i = 0; i < 16; ++i) rows[i] = data + offsets[smaller(i, count - 1)];
    return;
  }
  // 8-bit vectors are too short for the processor to see the next ones coming.
  const int64_t next = smaller(32, keys - key);
  for (int64_t i = 16; i < next; ++i)
    for (int64_t d = 0; d < Chunks * 32; d += 64)
      _mm_prefetch(head(static_cast<const char*>(pool.data)) + offsets[i] + d, _MM_HINT_T0);
  if (dtype == Dtype::fp8) convert<Chunks>(head(static_cast<const fp8*>(pool.data)), offsets, count, tail, copies);
  else convert<Chunks>(head(static_cast<const int8_t*>(pool.data)), offsets, count, tail, copies);
  for (int64_t i = 0; i < 16; ++i) rows[i] = copies + smaller(i, count - 1) * Chunks * 32;
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
      alignas(64) bf16 copies[16 * kDim];
      gather<Chunks>(a.pool, a.k, heads[h].kv_head, k_offset, key, keys, tail, copies, k);
      score_keys<Chunks>(k, q + h * rows * kDim, rows, tail, scores + h * rows * kKeyBlock + key);
    }
  float key_scales[2 * kKeyBlock];
  BlockScales scales;
  for (int64_t r = 0; r < all; ++r) {
    const Rows& head = heads[r / rows];
    if (r % rows == 0) scales = gather_scales(a, head, begin, begin, end, key_scales);
    int64_t first, last;
    visible_keys(a, position(a, head, head.row_begin + r % rows), begin, end, &first, &last);
    float* row = scores + r * kKeyBlock;
    top[r] = -__builtin_inff();
    total[r] = 0;
    if (first < last)
      total[r] = softmax_row(a, row, weights + r * kKeyBlock, round_up(keys, 16), first - begin, last - begin,
                             scales, &top[r]);
    else
      std::memset(weights + r * kKeyBlock, 0, kKeyBlock * sizeof(bf16));
  }
  for (int64_t key = 0; key < keys; key += 16)
    for (int64_t h = 0; h < count; ++h) {
      const bf16* v[16];  // past the last key with weight 0
      alignas(64) bf16 copies[16 * kDim], pairs[16 * kDim];
      gather<Chunks>(a.pool, a.v, heads[h].kv_head, v_offset, key, keys, tail, copies, v);
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

}  // namespace

namespace isa_avx512 {

int64_t bf16_direct_scratch_bytes(const AttentionArgs& a, int64_t rows) {
  return rows * (kKeyBlock * (4 + 2) + round_up(a.head_dim, 32) * (2 + 4) + 2 * 4);
}

void bf16_direct(const AttentionArgs& a, const Rows* heads, int64_t count, int64_t begin, int64_t end,
                 int64_t split, char* scratch) {
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

}  // namespace isa_avx512
}  // namespace kvforge
