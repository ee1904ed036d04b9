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

// In each group of 2 * width lanes: the sums of a's two halves, then those of b's.
template <int width>
inline vfloat fold(vfloat a, vfloat b) {
  const vint low = (iota() & ~width) + ((iota() & width) != 0 ? vint{} + kLanes : vint{});
  return __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, low + width);
}

template <int Count, int width>
inline void fold_all(vfloat* x) {
  if constexpr (width > 0) {
    if constexpr (Count > 1) {
#pragma GCC unroll 8
      for (int i = 0; i < Count / 2; ++i) x[i] = fold<width>(x[2 * i], x[2 * i + 1]);
      fold_all<Count / 2, width / 2>(x);
    } else {
      x[0] += __builtin_shuffle(x[0], iota() ^ width);
      fold_all<1, width / 2>(x);
    }
  }
}

// The lane in which folding leaves the sum of a vector: the first bit of its index chooses between halves, and so on.
constexpr int lane_of(int index) {
  int lane = 0;
  for (int width = kLanes / 2; width > 0; width /= 2, index /= 2) lane += index % 2 * width;
  return lane;
}

// The sums of the lanes of Count vectors, a power of two, in a fixed order.
template <int Count>
inline void sums(const vfloat* x, float* out) {
  vfloat folded[Count];
  if constexpr (Count < kLanes) {
#pragma GCC unroll 16
    for (int i = 0; i < Count; ++i) folded[i] = x[i];
    fold_all<Count, kLanes / 2>(folded);
#pragma GCC unroll 16
    for (int i = 0; i < Count; ++i) out[i] = folded[0][lane_of(i)];
  } else {
#pragma GCC unroll 16
    for (int i = 0; i < Count; ++i) folded[i / kLanes * kLanes + lane_of(i % kLanes)] = x[i];
    fold_all<Count, kLanes / 2>(folded);
#pragma GCC unroll 16
    for (int i = 0; i < Count / kLanes; ++i) store(out + i * kLanes, folded[i]);
  }
}

#if defined(__AVX512BF16__)
inline __m512bh load_pairs(const bf16* p) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(p)); }

inline __m512bh load_pairs(const bf16* p, int64_t count) {
  return reinterpret_cast<__m512bh>(_mm512_maskz_loadu_epi16((1u << count) - 1, p));
}

template <int Heads>
inline void multiply(const bf16* q, const bf16* const (&rows)[kRows], int64_t dim, float (&out)[Heads][kRows]) {
  __m512 acc[Heads][kRows] = {};
  const auto add = [&](int64_t d, auto... count) {
    __m512bh row[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) row[r] = load_pairs(rows[r] + d, count...);
#pragma GCC unroll 4
    for (int h = 0; h < Heads; ++h) {
      const __m512bh query = load_pairs(q + h * dim + d, count...);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) acc[h][r] = _mm512_dpbf16_ps(acc[h][r], query, row[r]);
    }
  };
  int64_t d = 0;
  for (; d + 32 <= dim; d += 32) add(d);
  if (d < dim) add(d, dim - d);
  sums<Heads * kRows>(reinterpret_cast<const vfloat*>(acc), out[0]);
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
  sums<Heads * kRows>(acc[0], out[0]);
  for (; d < dim; ++d)
    for (int h = 0; h < Heads; ++h)
      for (int r = 0; r < kRows; ++r) out[h][r] += to_float(q[h * dim + d]) * to_float(rows[r][d]);
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
  if (end == s.chunks)
    for (int64_t head = 0; head < a.kv_heads; ++head)
      std::memset(s.excluded + head * s.stride + end, 1, s.stride - end);
  const auto row_of = [&](int64_t chunk) {
    const int64_t m = chunk < end ? chunk : end - 1;
    return s.pages[m / a.chunks_per_page] * a.chunks_per_page + m % a.chunks_per_page;
  };
  for (int64_t first = begin; first < end; first += kRows) {
    const T *chunk[kRows], *next[kRows];
    const uint8_t* outlier[kRows];
    for (int64_t r = 0; r < kRows; ++r) {
      const int64_t row = row_of(first + r);
      chunk[r] = landmarks + row * row_size;
      next[r] = landmarks + row_of(first + r + kRows) * row_size;
      outlier[r] = a.is_outlier + row * a.kv_heads;
    }
    for (int64_t head = 0; head < a.kv_heads; ++head) {
      for (int r = 0; r < kRows; ++r)
        s.excluded[head * s.stride + first + r] = first + r >= end || outlier[r][head] != 0;
      const T* rows[kRows];
      for (int r = 0; r < kRows; ++r) {
        rows[r] = chunk[r] + head * dim;
        for (int64_t d = 0; d < dim; d += 64 / sizeof(T)) __builtin_prefetch(next[r] + head * dim + d);
      }
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
constexpr int32_t kNever = std::numeric_limits<int32_t>::min();

inline vint load_ints(const int32_t* p) {
  vint x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

inline void store_ints(int32_t* p, vint x) { std::memcpy(p, &x, sizeof x); }

// Logarithm of the sum of the exponentials of logits [0, count), those whose key is kNever left out.
float log_sum_exp(float* logits, const int32_t* keys, int64_t count) {
  vfloat top = broadcast(kLowest);
  for (int64_t m = 0; m < count; m += kLanes) {
    const vfloat kept = load_ints(keys + m) == kNever ? broadcast(kLowest) : load(logits + m);
    store(logits + m, kept);
    top = maximum(kept, top);
  }
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

// How many of keys [0, count) are at least `bound`.
int64_t count_from(const int32_t* keys, int64_t count, int32_t bound) {
  vint found = {};
  for (int64_t m = 0; m < count; m += kLanes) {
    found -= load_ints(keys + m) >= bound;
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
  const uint8_t* excluded = s.excluded + head * s.stride;
  vint outside = {};
  for (int64_t m = 0; m < width; m += kLanes) {
    const vint is_excluded = load_bytes(reinterpret_cast<const int8_t*>(excluded + m));
    outside += is_excluded;
    store_ints(keys + m, is_excluded << 31);
  }
  int64_t candidates = width;
  for (int i = 0; i < kLanes; ++i) candidates -= outside[i];
  const int64_t wanted = s.selected < candidates ? s.selected : candidates;
  if (wanted == 0) return;
  float* best = s.logits + head * a.group * s.stride;
  for (int64_t h = 0; h < a.group; ++h) {
    float* logits = best + h * s.stride;
    const float total = log_sum_exp(logits, keys, width);
    for (int64_t m = 0; m < width; m += kLanes) {
      vfloat score = load(logits + m) - total;
      score = score == score ? score : broadcast(kLowest);
      store(best + m, h == 0 ? score : maximum(load(best + m), score));
    }
  }
  for (int64_t m = 0; m < width; m += kLanes)
    store_ints(keys + m, load_ints(keys + m) == kNever ? load_ints(keys + m) : ordered(load(best + m)));
  const int32_t bound = threshold(keys, width, wanted);
  const int64_t above = bound == std::numeric_limits<int32_t>::max() ? 0 : count_from(keys, width, bound + 1);
  int64_t equal = wanted - above;
  int32_t* out = a.selected + (s.index * a.kv_heads + head) * a.max_selected;
  for (int64_t m = 0, n = 0; n < wanted; ++m)
    if (keys[m] > bound || (keys[m] == bound && equal-- > 0)) out[n++] = static_cast<int32_t>(m);
}

}  // namespace KVFORGE_ISA
}  // namespace kvforge
