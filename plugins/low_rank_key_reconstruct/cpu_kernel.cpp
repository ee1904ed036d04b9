// Keys of one KV head of one sequence: gathered rows of U times SV, rotated. Compiled once per instruction set
// into namespace KVFORGE_ISA, so no inline function with external linkage may be used here: the linker would
// keep one variant of it. A key's sum runs over the rank in a fixed order, whatever the other keys.
#include "low_rank_key_reconstruct/cpu_kernel.h"

#include "native/simd.h"

namespace kvforge {
namespace {

constexpr int kRows = 6;                        // multiplied together
constexpr int kVectors = kLanes == 16 ? 4 : 2;  // of columns, so that the sums stay in registers
constexpr int64_t kBlock = kReconstructBlock;
#if defined(__AVX512BF16__)
constexpr bool kPairs = true;  // bfloat16 is multiplied in pairs of the rank
#else
constexpr bool kPairs = false;
#endif
static_assert(kBlock % kRows == 0);

// Columns [first, first + width) of SV as the products take them: [rank, width] floats, or pairs of the rank as
// [rank / 2, width, 2] bfloat16. Columns from dim on are 0.
template <typename T>
void pack(const T* sv, int64_t rank, int64_t dim, int64_t first, int64_t width, float* out) {
  for (int64_t k = 0; k < rank; ++k, out += width)
    for (int64_t d = 0; d < width; ++d) out[d] = first + d < dim ? to_float(sv[k * dim + first + d]) : 0.0f;
}

// out[r, 0 .. Vectors * kLanes) = u[r] b for kRows rows, which are `stride` apart in out.
template <int Vectors, typename T>
void multiply(const T* const* u, const float* b, int64_t rank, int64_t stride, float* out) {
  vfloat acc[kRows][Vectors] = {};
  for (int64_t k = 0; k < rank; ++k, b += Vectors * kLanes) {
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
    for (int j = 0; j < Vectors; ++j) store(out + r * stride + j * kLanes, acc[r][j]);
}

#if defined(__AVX512BF16__)
void pack(const bf16* sv, int64_t rank, int64_t dim, int64_t first, int64_t width, float* out) {
  for (int64_t k = 0; k < rank; k += 2, out += width)
    for (int64_t d = 0; d < width; d += kLanes) {
      const int64_t left = dim - first - d;
      const __mmask16 mask = left >= kLanes ? 0xffff : left > 0 ? (1u << left) - 1 : 0;
      const bf16* row = sv + k * dim + first + d;
      const __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, row));
      const __m512i high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(k + 1 < rank ? mask : 0, row + dim));
      _mm512_storeu_si512(out + d, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
}

template <int Vectors>
void multiply(const bf16* const* u, const float* b, int64_t rank, int64_t stride, float* out) {
  const bf16* const row[kRows] = {u[0], u[1], u[2], u[3], u[4], u[5]};
  __m512 acc[kRows][Vectors] = {};
  const auto add = [&](auto pair) {
    __m512bh right[Vectors];
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) right[j] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(b + j * kLanes));
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      const __m512bh left = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair(row[r])));
#pragma GCC unroll 4
      for (int j = 0; j < Vectors; ++j) acc[r][j] = _mm512_dpbf16_ps(acc[r][j], left, right[j]);
    }
    b += Vectors * kLanes;
  };
  for (int64_t k = 0; k + 1 < rank; k += 2)
    add([k](const bf16* values) {
      int32_t pair;
      std::memcpy(&pair, values + k, sizeof pair);
      return pair;
    });
  if (rank % 2 != 0) add([rank](const bf16* values) { return int32_t{values[rank - 1]}; });
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) _mm512_storeu_ps(out + r * stride + j * kLanes, acc[r][j]);
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

template <int write>
inline void fetch(const void* data, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(data) + i, write);
}

template <typename T>
void rebuild(const KeyFactors& a, const RebuiltKey* keys, int64_t count, float* products) {
  if (count == 0) return;
  const int64_t dim = a.head_dim, half = dim / 2, rank = a.rank;
  const int64_t padded = (dim + kReconstructColumns - 1) / kReconstructColumns * kReconstructColumns;
  const int64_t depth = sizeof(T) == 2 && kPairs ? (rank + 1) / 2 : rank;
  const T *u = static_cast<const T*>(a.u), *sv = static_cast<const T*>(a.sv);
  float* packed = products + kBlock * padded;
  const auto by_columns = [&](const auto& whole, const auto& single) {
    int64_t d = 0;
    for (; d + kVectors * kLanes <= padded; d += kVectors * kLanes) whole(d);
    for (; d < padded; d += kLanes) single(d);
  };
  by_columns([&](int64_t d) { pack(sv, rank, dim, d, kVectors * kLanes, packed + d * depth); },
             [&](int64_t d) { pack(sv, rank, dim, d, kLanes, packed + d * depth); });
  // Memory of the next block is asked for between the products of this one.
  int64_t asked = 0;
  const auto ask = [&](int64_t end) {
    for (end = end < count ? end : count; asked < end; ++asked) {
      const RebuiltKey& key = keys[asked];
      fetch<0>(u + key.row * rank, rank * sizeof(T));
      fetch<1>(key.key, dim * sizeof(T));
      fetch<0>(a.cos + key.position * half, half * sizeof(float));
      fetch<0>(a.sin + key.position * half, half * sizeof(float));
      if (key.value == nullptr) continue;
      fetch<0>(key.value, dim * sizeof(T));
      fetch<1>(key.value_target, dim * sizeof(T));
    }
  };
  ask(kBlock);
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t size = count - begin < kBlock ? count - begin : kBlock;
    const T* rows[kBlock];
    for (int64_t i = 0; i < size; ++i) rows[i] = u + keys[begin + i].row * rank;
    const int64_t tiles = (size + kRows - 1) / kRows;
    for (int64_t i = size; i < tiles * kRows; ++i) rows[i] = rows[0];
    const int64_t next = begin + 2 * kBlock;
    const auto tile = [&]<int Vectors>(int64_t d) {
      const int64_t share = kRows * Vectors * kLanes / padded;
      for (int64_t t = 0; t < tiles; ++t) {
        ask(asked + share < next ? asked + share : next);
        multiply<Vectors>(rows + t * kRows, packed + d * depth, rank, padded, products + t * kRows * padded + d);
      }
    };
    by_columns([&](int64_t d) { tile.template operator()<kVectors>(d); },
               [&](int64_t d) { tile.template operator()<1>(d); });
    ask(next);
    for (int64_t i = 0; i < size; ++i) {
      const RebuiltKey& key = keys[begin + i];
      const int64_t angle = key.position * half;
      rotate(products + i * padded, a.cos + angle, a.sin + angle, static_cast<T*>(key.key), half);
      if (key.value != nullptr) std::memcpy(key.value_target, key.value, dim * sizeof(T));
    }
  }
}

}  // namespace

namespace KVFORGE_ISA {

void rebuild_keys(const KeyFactors& factors, const RebuiltKey* keys, int64_t count, float* scratch) {
  if (factors.bf16) rebuild<bf16>(factors, keys, count, scratch);
  else rebuild<float>(factors, keys, count, scratch);
}

}  // namespace KVFORGE_ISA
}  // namespace kvforge
