// Scores of chunks by their landmarks, and the selection of the best. Compiled once per instruction set into namespace
// KVFORGE_ISA, so no inline function with external linkage may be used here: the linker would keep one variant of it.
// A logit is one dot product in a fixed order of sums, whatever is computed beside it.
#include "landmark_select/cpu_kernel.h"

#include <cmath>
#include <limits>

#include "native/simd.h"

namespace kvforge {
namespace {

constexpr int kRows = 4;  // landmarks multiplied together

// The sums of four vectors.
inline void sums(const vfloat (&x)[4], float* out) {
  for (int r = 0; r < 4; ++r) out[r] = sum(x[r]);
}

#if defined(__AVX512BF16__)
inline __m512bh load_pairs(const bf16* p, int64_t left) {
  const __mmask32 mask = left >= 32 ? 0xffffffffu : (1u << left) - 1;
  return reinterpret_cast<__m512bh>(_mm512_maskz_loadu_epi16(mask, p));
}

template <int Heads>
inline void multiply(const bf16* q, const bf16* const (&rows)[kRows], int64_t dim, float (&out)[Heads][kRows]) {
  __m512 acc[Heads][kRows] = {};
  for (int64_t d = 0; d < dim; d += 32) {
    __m512bh row[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) row[r] = load_pairs(rows[r] + d, dim - d);
#pragma GCC unroll 4
    for (int h = 0; h < Heads; ++h) {
      const __m512bh query = load_pairs(q + h * dim + d, dim - d);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) acc[h][r] = _mm512_dpbf16_ps(acc[h][r], query, row[r]);
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < Heads; ++h) sums(reinterpret_cast<const vfloat(&)[kRows]>(acc[h]), out[h]);
}
#endif

template <int Heads, typename T>
inline void multiply(const T* q, const T* const (&rows)[kRows], int64_t dim, float (&out)[Heads][kRows]) {
  vfloat acc[Heads][kRows] = {};
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) {
    vfloat row[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) row[r] = load(rows[r] + d);
#pragma GCC unroll 4
    for (int h = 0; h < Heads; ++h) {
      const vfloat query = load(q + h * dim + d);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) acc[h][r] += query * row[r];
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < Heads; ++h) {
    sums(acc[h], out[h]);
    for (int64_t tail = d; tail < dim; ++tail)
      for (int r = 0; r < kRows; ++r) out[h][r] += to_float(q[h * dim + tail]) * to_float(rows[r][tail]);
  }
}

template <int Heads, typename T>
inline void score_heads(const T* q, const T* const (&rows)[kRows], int64_t dim, float scale, float* logits,
                        int64_t stride) {
  float products[Heads][kRows];
  multiply<Heads>(q, rows, dim, products);
  for (int h = 0; h < Heads; ++h)
    for (int r = 0; r < kRows; ++r) logits[h * stride + r] = products[h][r] * scale;
}

template <typename T>
void score(const LandmarkSelect& a, const LandmarkSequence& s, int64_t begin, int64_t end) {
  const int64_t dim = a.head_dim, row_size = a.kv_heads * dim;
  const T* landmarks = static_cast<const T*>(a.landmarks);
  const T* query = static_cast<const T*>(a.q) + s.query * a.kv_heads * a.group * dim;
  for (int64_t first = begin; first < end; first += kRows) {
    const T* chunk[kRows];
    for (int64_t r = 0; r < kRows; ++r) {
      const int64_t m = first + r < end ? first + r : end - 1;
      chunk[r] = landmarks + (s.pages[m / a.chunks_per_page] * a.chunks_per_page + m % a.chunks_per_page) * row_size;
    }
    for (int64_t head = 0; head < a.kv_heads; ++head) {
      const T* rows[kRows];
      for (int r = 0; r < kRows; ++r) rows[r] = chunk[r] + head * dim;
      int64_t h = head * a.group;
      const int64_t last = h + a.group;
      const auto take = [&]<int Heads>() {
        score_heads<Heads>(query + h * dim, rows, dim, a.scale, s.logits + h * s.stride + first, s.stride);
        h += Heads;
      };
      while (h + 4 <= last) take.template operator()<4>();
      if (h + 2 <= last) take.template operator()<2>();
      if (h < last) take.template operator()<1>();
    }
  }
}

constexpr float kLowest = -std::numeric_limits<float>::infinity();

// Logarithm of the sum of the exponentials of logits [0, count); lanes past the end and outliers are -inf.
float log_sum_exp(const float* logits, int64_t count) {
  vfloat top = broadcast(kLowest);
  for (int64_t m = 0; m < count; m += kLanes) top = maximum(load(logits + m), top);
  const float largest = maximum(top);
  vfloat total = {};
  for (int64_t m = 0; m < count; m += kLanes) total += exp_nonpositive(load(logits + m) - largest);
  return largest + std::log(sum(total));
}

// Integers in the order of the floats; every float is above the smallest integer.
inline vint ordered(vfloat x) {
  const vint bits = reinterpret_cast<vint>(x);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

constexpr int32_t kNever = std::numeric_limits<int32_t>::min();

// How many of keys [0, count) are at least `bound`.
int64_t count_from(const int32_t* keys, int64_t count, int32_t bound) {
  vint found = {};
  for (int64_t m = 0; m < count; m += kLanes) {
    vint key;
    std::memcpy(&key, keys + m, sizeof key);
    found -= key >= bound;
  }
  int64_t total = 0;
  for (int i = 0; i < kLanes; ++i) total += found[i];
  return total;
}

// The largest bound that at least `wanted` keys reach; there are so many above kNever.
int32_t threshold(const int32_t* keys, int64_t count, int64_t wanted) {
  int64_t low = int64_t{kNever} + 1, high = int64_t{std::numeric_limits<int32_t>::max()} + 1;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (count_from(keys, count, static_cast<int32_t>(middle)) >= wanted ? low : high) = middle;
  }
  return static_cast<int32_t>(low);
}

}  // namespace

namespace KVFORGE_ISA {

void score_chunks(const LandmarkSelect& args, const LandmarkSequence& sequence, int64_t begin, int64_t end) {
  args.bf16 ? score<bf16>(args, sequence, begin, end) : score<float>(args, sequence, begin, end);
}

void select_chunks(const LandmarkSelect& a, const LandmarkSequence& s, int64_t head, int32_t* keys) {
  const int64_t width = (s.chunks + kLanes - 1) / kLanes * kLanes;
  int64_t candidates = 0;
  for (int64_t m = 0; m < width; ++m) {
    const bool present = m < s.chunks &&
        a.is_outlier[(s.pages[m / a.chunks_per_page] * a.chunks_per_page + m % a.chunks_per_page) * a.kv_heads +
                     head] == 0;
    candidates += present;
    keys[m] = present ? 0 : kNever;
    if (present) continue;
    for (int64_t h = head * a.group; h < (head + 1) * a.group; ++h) s.logits[h * s.stride + m] = kLowest;
  }
  const int64_t wanted = s.selected < candidates ? s.selected : candidates;
  if (wanted == 0) return;
  float* best = s.logits + head * a.group * s.stride;
  for (int64_t h = 0; h < a.group; ++h) {
    const float* logits = best + h * s.stride;
    const float total = log_sum_exp(logits, width);
    for (int64_t m = 0; m < width; m += kLanes) {
      vfloat score = load(logits + m) - total;
      score = score == score ? score : broadcast(kLowest);
      store(best + m, h == 0 ? score : maximum(load(best + m), score));
    }
  }
  for (int64_t m = 0; m < width; m += kLanes) {
    vint key;
    std::memcpy(&key, keys + m, sizeof key);
    key = key == kNever ? key : ordered(load(best + m));
    std::memcpy(keys + m, &key, sizeof key);
  }
  const int32_t bound = threshold(keys, width, wanted);
  const int64_t above = bound == std::numeric_limits<int32_t>::max() ? 0 : count_from(keys, width, bound + 1);
  int64_t equal = wanted - above;
  int32_t* out = a.selected + (s.index * a.kv_heads + head) * a.max_selected;
  for (int64_t m = 0, n = 0; n < wanted; ++m)
    if (keys[m] > bound || (keys[m] == bound && equal-- > 0)) out[n++] = static_cast<int32_t>(m);
}

}  // namespace KVFORGE_ISA
}  // namespace kvforge
