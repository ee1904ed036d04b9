// Keys of one KV head of one sequence: gathered rows of U times SV, rotated. Compiled once per instruction set
// into namespace KVFORGE_ISA, so no inline function with external linkage may be used here: the linker would
// keep one variant of it. A key's sum runs over the rank in a fixed order, whatever the other keys.
#include "low_rank_key_reconstruct/cpu_kernel.h"

#include "native/simd.h"

namespace kvforge {
namespace {

constexpr int kRows = kReconstructRows;
constexpr int kVectors = kLanes == 16 ? 4 : 2;  // of columns, so that the sums stay in registers

// SV of one head as the products take it: [rank, padded] floats, or pairs of the rank as [rank / 2, padded, 2] bfloat16.
template <typename T>
void pack(const T* sv, int64_t rank, int64_t dim, int64_t padded, float* out) {
  for (int64_t k = 0; k < rank; ++k)
    for (int64_t d = 0; d < padded; ++d) out[k * padded + d] = d < dim ? to_float(sv[k * dim + d]) : 0.0f;
}

// out[r, 0 .. Vectors * kLanes) = u[r] b for kRows rows.
template <int Vectors, typename T>
void multiply(const T* const (&u)[kRows], const float* b, int64_t rank, int64_t padded, float* out) {
  vfloat acc[kRows][Vectors] = {};
  for (int64_t k = 0; k < rank; ++k, b += padded) {
    vfloat right[Vectors];
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) right[j] = load(b + j * kLanes);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      const float left = to_float(u[r][k]);
#pragma GCC unroll 4
      for (int j = 0; j < Vectors; ++j) acc[r][j] += left * right[j];
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) store(out + r * padded + j * kLanes, acc[r][j]);
}

#if defined(__AVX512BF16__)
void pack(const bf16* sv, int64_t rank, int64_t dim, int64_t padded, float* out) {
  for (int64_t k = 0; k < rank; k += 2, out += padded)
    for (int64_t d = 0; d < padded; ++d) {
      const uint32_t low = d < dim ? sv[k * dim + d] : 0;
      const uint32_t high = d < dim && k + 1 < rank ? sv[(k + 1) * dim + d] : 0;
      out[d] = from_bits(low | high << 16);
    }
}

template <int Vectors>
void multiply(const bf16* const (&u)[kRows], const float* b, int64_t rank, int64_t padded, float* out) {
  __m512 acc[kRows][Vectors] = {};
  const auto add = [&](auto pair) {
    __m512bh right[Vectors];
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) right[j] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(b + j * kLanes));
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      const __m512bh left = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair(u[r])));
#pragma GCC unroll 4
      for (int j = 0; j < Vectors; ++j) acc[r][j] = _mm512_dpbf16_ps(acc[r][j], left, right[j]);
    }
    b += padded;
  };
  for (int64_t k = 0; k + 1 < rank; k += 2)
    add([k](const bf16* row) {
      int32_t pair;
      std::memcpy(&pair, row + k, sizeof pair);
      return pair;
    });
  if (rank % 2 != 0) add([rank](const bf16* row) { return int32_t{row[rank - 1]}; });
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) _mm512_storeu_ps(out + r * padded + j * kLanes, acc[r][j]);
}
#endif

template <typename T>
void rotate(const float* __restrict__ x, const float* __restrict__ cos, const float* __restrict__ sin,
            T* __restrict__ out, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    store(out + i, x[i] * cos[i] - x[i + half] * sin[i]);
    store(out + i + half, x[i + half] * cos[i] + x[i] * sin[i]);
  }
}

template <typename T>
void reconstruct(const KeyReconstruct& a, int64_t sequence, int64_t head, int64_t begin, int64_t end,
                 float* products) {
  const int64_t dim = a.head_dim, half = dim / 2;
  const int64_t padded = (dim + kReconstructColumns - 1) / kReconstructColumns * kReconstructColumns;
  float* packed = products + kRows * padded;
  T* out = static_cast<T*>(a.out);
  const T* u[kRows];
  int64_t selected[kRows], count = 0;
  bool is_packed = false;
  const auto finish = [&] {
    if (!is_packed)
      pack(static_cast<const T*>(a.sv) + (sequence * a.kv_heads + head) * a.rank * dim, a.rank, dim, padded, packed);
    is_packed = true;
    for (int64_t r = count; r < kRows; ++r) u[r] = u[0];
    int64_t d = 0;
    for (; d + kVectors * kLanes <= padded; d += kVectors * kLanes)
      multiply<kVectors>(u, packed + d, a.rank, padded, products + d);
    for (; d < padded; d += kLanes) multiply<1>(u, packed + d, a.rank, padded, products + d);
    for (int64_t r = 0; r < count; ++r) {
      const int64_t row = a.positions[selected[r]] * half;
      rotate(products + r * padded, a.cos + row, a.sin + row, out + selected[r] * dim, half);
    }
    count = 0;
  };
  for (int64_t n = begin; n < end; ++n) {
    const int64_t index = n * a.kv_heads + head;
    if (a.rows[index] < 0) continue;
    u[count] = static_cast<const T*>(a.u) + a.rows[index] * a.rank;
    selected[count++] = index;
    if (count == kRows) finish();
  }
  if (count > 0) finish();
}

}  // namespace

namespace KVFORGE_ISA {

void reconstruct_keys(const KeyReconstruct& args, int64_t sequence, int64_t head, int64_t begin, int64_t end,
                      float* scratch) {
  if (args.bf16) reconstruct<bf16>(args, sequence, head, begin, end, scratch);
  else reconstruct<float>(args, sequence, head, begin, end, scratch);
}

}  // namespace KVFORGE_ISA
}  // namespace kvforge
