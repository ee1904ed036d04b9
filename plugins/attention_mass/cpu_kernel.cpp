// Attention weights of a block of queries, and their sums. Compiled once per instruction set into namespace
// KVFORGE_ISA, so no inline function with external linkage may be used here: the linker would keep one variant of it.
// A logit is one sum in the order of the dimensions, a total one sum in the order of the query's own slots: neither
// depends on what is computed beside it.
#include "attention_mass/cpu_kernel.h"

#include "native/simd.h"
#include "native/transpose.h"

namespace kvforge {
namespace {

typedef int32_t word;  // of packed keys and queries: a float32, or a pair of bfloat16

#if defined(__AVX512F__)
constexpr int kRows = 8;  // rows of logits that are summed together
#else
constexpr int kRows = 4;
#endif
constexpr int kVectors = 2;  // and vectors of slots
constexpr float kLowest = -__builtin_inff();

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

// Whether keys and queries are multiplied as pairs of bfloat16, which hold every 8-bit number.
inline bool in_pairs(const AttentionMass& a) {
#if defined(__AVX512BF16__)
  return a.q_bf16 && a.pool != Dtype::float32;
#else
  return false;
#endif
}

inline int64_t depth(const AttentionMass& a) { return in_pairs(a) ? (a.head_dim + 1) / 2 : a.head_dim; }
inline int64_t padded_depth(const AttentionMass& a) { return round_up(depth(a), 16); }

// Goes through the slots of a sequence; what lies there of a tensor, at its first KV head.
class Slots {
 public:
  Slots(const MassTensor& tensor, const int32_t* pages, int64_t page_size, int64_t slot)
      : tensor_(tensor), pages_(pages + slot / page_size), page_size_(page_size), row_(slot % page_size) {}

  int64_t offset() const { return *pages_ * tensor_.page_stride + row_ * tensor_.row_stride; }

  void next() {
    if (++row_ == page_size_) {
      row_ = 0;
      ++pages_;
    }
  }

 private:
  const MassTensor& tensor_;
  const int32_t* pages_;
  int64_t page_size_, row_;
};

// The kLanes float32, or as many pairs, from here on.
template <bool Pairs, typename T>
inline vint load_words(const T* from) {
#if defined(__AVX512BF16__)
  if constexpr (Pairs && sizeof(T) == 2) {
    vint x;
    std::memcpy(&x, from, sizeof x);
    return x;
  } else if constexpr (Pairs) {
    return reinterpret_cast<vint>(_mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(load(from + kLanes)),
                                                      reinterpret_cast<__m512>(load(from))));
  }
#endif
  return reinterpret_cast<vint>(load(from));
}

// The same of which `count` elements exist; the others are zeros.
template <bool Pairs, typename T>
vint load_tail(const T* from, int64_t count) {
  T tail[Pairs ? 2 * kLanes : kLanes] = {};
  for (int64_t i = 0; i < count; ++i) tail[i] = from[i];
  return load_words<Pairs>(tail);
}

// A strip is [padded_depth, kMassStrip] words. Past the last slot its key is repeated: no query sees those. The keys of
// the next strip are fetched on the way.
template <bool Pairs, typename T>
void pack(const AttentionMass& a, const MassQueries& x, int64_t begin, int64_t end, word* out) {
  const T* keys = static_cast<const T*>(a.k.data) + x.kv_head * a.k.head_stride;
  constexpr int64_t kElements = Pairs ? 2 : 1;  // of a word
  const T* row = nullptr;
  const int64_t size = padded_depth(a);
  Slots slot(a.k, x.pages, a.page_size, begin), ahead(a.k, x.pages, a.page_size, begin + kMassStrip);
  for (int64_t strip = begin; strip < end; strip += kMassStrip, out += size * kMassStrip)
    for (int64_t first = strip; first < strip + kMassStrip; first += kLanes) {
      const T* rows[kLanes];
      for (int64_t i = 0; i < kLanes; ++i) {
        if (first + i < x.length) row = keys + slot.offset();
        rows[i] = row;
        slot.next();
        if (first + i + kMassStrip < x.length)
          for (int64_t d = 0; d < a.head_dim; d += 64 / sizeof(T)) __builtin_prefetch(keys + ahead.offset() + d);
        ahead.next();
      }
      for (int64_t d = 0; d < size; d += kLanes) {
        vint block[kLanes];
        const int64_t from = d * kElements, count = a.head_dim - from;
        if (count >= kLanes * kElements)
#pragma GCC unroll 16
          for (int64_t i = 0; i < kLanes; ++i) block[i] = load_words<Pairs>(rows[i] + from);
        else
          for (int64_t i = 0; i < kLanes; ++i) block[i] = load_tail<Pairs>(rows[i] + from, count);
        transpose(block);
#pragma GCC unroll 16
        for (int64_t i = 0; i < kLanes; ++i)
          std::memcpy(out + (d + i) * kMassStrip + first - strip, &block[i], sizeof block[i]);
      }
    }
}

template <typename T>
void pack(const AttentionMass& a, const MassQueries& x, int64_t begin, int64_t end, word* out) {
#if defined(__AVX512BF16__)
  if constexpr (sizeof(T) < 4)
    if (in_pairs(a)) return pack<true, T>(a, x, begin, end, out);
#endif
  pack<false, T>(a, x, begin, end, out);
}

void pack(const AttentionMass& a, const MassQueries& x, int64_t begin, int64_t end, word* out) {
  switch (a.pool) {
    case Dtype::float32: return pack<float>(a, x, begin, end, out);
    case Dtype::bfloat16: return pack<bf16>(a, x, begin, end, out);
    case Dtype::fp8: return pack<fp8>(a, x, begin, end, out);
    case Dtype::int8: return pack<int8_t>(a, x, begin, end, out);
    case Dtype::int4: return;  // refused
  }
}

// The heads of queries [begin, end), a row of `depth` words each.
void load_queries(const AttentionMass& a, const MassQueries& x, int64_t begin, int64_t end, word* out) {
  const int64_t words = depth(a);
  for (int64_t j = begin; j < end; ++j)
    for (int64_t h = 0; h < a.group; ++h, out += words) {
      const int64_t offset = (x.first_token + j) * a.q_token_stride + (x.kv_head * a.group + h) * a.q_head_stride;
      const bf16* half = static_cast<const bf16*>(a.q) + offset;
      if (in_pairs(a)) {
        out[words - 1] = 0;
        std::memcpy(out, half, a.head_dim * sizeof(bf16));
      } else {
        for (int64_t d = 0; d < a.head_dim; ++d) {
          const float value = a.q_bf16 ? to_float(half[d]) : static_cast<const float*>(a.q)[offset + d];
          std::memcpy(out + d, &value, sizeof value);
        }
      }
    }
}

template <bool Pairs>
inline vfloat multiply_add(word left, const word* right, vfloat sum) {
#if defined(__AVX512BF16__)
  if constexpr (Pairs)
    return reinterpret_cast<vfloat>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum),
                                                     reinterpret_cast<__m512bh>(_mm512_set1_epi32(left)),
                                                     reinterpret_cast<__m512bh>(_mm512_loadu_si512(right))));
#endif
  return sum + from_bits(static_cast<uint32_t>(left)) * load(reinterpret_cast<const float*>(right));
}

template <bool Pairs, int Rows>
inline void multiply_rows(int64_t words, const word* q, const word* strip, float* logits, int64_t width) {
  for (int64_t slot = 0; slot < kMassStrip; slot += kVectors * kLanes) {
    vfloat acc[Rows][kVectors] = {};
    for (int64_t d = 0; d < words; ++d)
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v)
          acc[r][v] = multiply_add<Pairs>(q[r * words + d], strip + d * kMassStrip + slot + v * kLanes, acc[r][v]);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) store(logits + r * width + slot + v * kLanes, acc[r][v]);
  }
}

// Logits [rows, width] of a strip's slots.
template <bool Pairs>
void multiply(int64_t rows, int64_t words, const word* q, const word* strip, float* logits, int64_t width) {
  int64_t r = 0;
  const auto take = [&]<int Rows>() {
    multiply_rows<Pairs, Rows>(words, q + r * words, strip, logits + r * width, width);
    r += Rows;
  };
  while (r + kRows <= rows) take.template operator()<kRows>();
  if (kRows > 4 && r + 4 <= rows) take.template operator()<4>();
  if (r + 2 <= rows) take.template operator()<2>();
  if (r < rows) take.template operator()<1>();
}

// Turns the first `visible` logits into exponentials relative to the largest, and returns their sum.
float exponentials(float* logits, int64_t visible, float scale, const float* key_scales) {
  vfloat top = broadcast(kLowest);
  for (int64_t i = 0; i < visible; i += kLanes) {
    vfloat x = load(logits + i);
    if (key_scales != nullptr) x *= load(key_scales + i);
    x = iota() + static_cast<int32_t>(i) < static_cast<int32_t>(visible) ? x * scale : broadcast(kLowest);
    store(logits + i, x);
    top = maximum(x, top);
  }
  const float largest = maximum(top);
  vfloat total = {};
  for (int64_t i = 0; i < visible; i += kLanes) {
    const vfloat x = exp_nonpositive(load(logits + i) - largest);
    store(logits + i, x);
    total += x;
  }
  return sum(total);
}

// What one query adds to each slot that it sees, from the logits of its heads, [group, width].
void weigh_query(const AttentionMass& a, float* logits, int64_t width, int64_t visible, const float* key_scales,
                 float* out) {
  const float threshold = 1.0f / static_cast<float>(visible), heads = static_cast<float>(a.group);
  for (int64_t h = 0; h < a.group; ++h) {
    float* own = logits + h * width;
    const float share = 1.0f / exponentials(own, visible, a.scale, key_scales);
    const bool is_last = h + 1 == a.group;
    for (int64_t i = 0; i < visible; i += kLanes) {
      const vfloat part = load(own + i) * share;
      const vfloat sum = h == 0 ? part : load(out + i) + part;
      const vfloat w = is_last ? sum / heads : sum;
      store(out + i, is_last && a.kind == 2 ? (w < threshold ? broadcast(1.0f) : vfloat{}) : w);
    }
  }
}

template <int Kind>
void add(const AttentionMass& a, const MassQueries& x, int64_t begin) {
  constexpr int kParts = kMassBlock / kLanes;
  const int64_t count = smaller(kMassBlock, x.length - begin);
  float kept[2][kMassBlock] = {};
  const MassTensor* tensors[] = {&a.mass, &a.squares};
  for (int t = 0; t < (Kind == 1 ? 2 : 1); ++t) {
    const float* data = static_cast<const float*>(tensors[t]->data) + x.kv_head * tensors[t]->head_stride;
    Slots slot(*tensors[t], x.state_pages, a.page_size, begin);
    for (int64_t i = 0; i < smaller(count, x.scored - begin); ++i, slot.next()) kept[t][i] = data[slot.offset()];
  }
  vfloat mass[kParts], squares[kParts];
#pragma GCC unroll 16
  for (int p = 0; p < kParts; ++p) {
    mass[p] = load(kept[0] + p * kLanes);
    squares[p] = load(kept[1] + p * kLanes);
  }
  for (int64_t j = larger(0, begin + 1 - x.first_visible); j < x.count; ++j) {
    const int32_t visible = static_cast<int32_t>(smaller(x.first_visible + j - begin, kMassBlock));
    const float* weights = x.weights + j * x.width + begin;
#pragma GCC unroll 16
    for (int p = 0; p < kParts; ++p) {
      const vint seen = iota() + p * kLanes < visible;
      const vfloat w = load(weights + p * kLanes);
      if (Kind == 3) {
        mass[p] = (seen & ((mass[p] < w) | (w != w))) ? w : mass[p];
      } else {
        mass[p] = seen ? mass[p] + w : mass[p];
        if (Kind == 1) squares[p] = seen ? squares[p] + w * w : squares[p];
      }
    }
  }
#pragma GCC unroll 16
  for (int p = 0; p < kParts; ++p) {
    store(kept[0] + p * kLanes, mass[p]);
    store(kept[1] + p * kLanes, squares[p]);
  }
  for (int t = 0; t < (Kind == 1 ? 2 : 1); ++t) {
    float* data = static_cast<float*>(tensors[t]->data) + x.kv_head * tensors[t]->head_stride;
    Slots slot(*tensors[t], x.state_pages, a.page_size, begin);
    for (int64_t i = 0; i < count; ++i, slot.next()) data[slot.offset()] = kept[t][i];
  }
}

}  // namespace

namespace KVFORGE_ISA {

int64_t mass_strip_bytes(const AttentionMass& a) { return padded_depth(a) * kMassStrip * sizeof(word); }

int64_t mass_scratch_bytes(const AttentionMass& a, int64_t queries, int64_t width) {
  return queries * (a.group * (width + depth(a)) + width) * sizeof(float) + mass_strip_bytes(a);
}

void pack_mass_keys(const AttentionMass& a, const MassQueries& x, int64_t begin, int64_t end) {
  pack(a, x, begin, end, reinterpret_cast<word*>(x.packed + begin / kMassStrip * mass_strip_bytes(a)));
}

void weigh(const AttentionMass& a, const MassQueries* heads, int64_t num_heads, int64_t begin, int64_t end,
           char* scratch) {
  const int64_t count = end - begin, rows = count * a.group, words = depth(a), width = heads[0].width;
  const int64_t last_visible = heads[0].first_visible + end - 1;
  float* logits = reinterpret_cast<float*>(scratch);  // [num_heads, rows, width]
  float* key_scales = logits + num_heads * rows * width;  // [num_heads, width]
  word* q = reinterpret_cast<word*>(key_scales + num_heads * width);  // [num_heads, rows, words]
  word* own = q + num_heads * rows * words;
  for (int64_t h = 0; h < num_heads; ++h) {
    load_queries(a, heads[h], begin, end, q + h * rows * words);
    if (a.k_scales.data == nullptr) continue;
    Slots slot(a.k_scales, heads[h].pages, a.page_size, 0);
    const float* scales = static_cast<const float*>(a.k_scales.data) + heads[h].kv_head * a.k_scales.head_stride;
    for (int64_t i = 0; i < last_visible; ++i, slot.next()) key_scales[h * width + i] = scales[slot.offset()];
  }
  // Slots outside, heads inside: the pool is read in the order it lies in memory.
  for (int64_t strip = 0; strip < last_visible; strip += kMassStrip) {
    // Queries that see none of the strip have no logits there.
    const int64_t row = larger(0, strip + 1 - heads[0].first_visible - begin) * a.group;
    for (int64_t h = 0; h < num_heads; ++h) {
      const word* keys = own;
      if (heads[h].packed == nullptr) pack(a, heads[h], strip, strip + kMassStrip, own);
      else keys = reinterpret_cast<const word*>(heads[h].packed + strip / kMassStrip * mass_strip_bytes(a));
      float* out = logits + (h * rows + row) * width + strip;
      const word* from = q + (h * rows + row) * words;
      if (in_pairs(a)) multiply<true>(rows - row, words, from, keys, out, width);
      else multiply<false>(rows - row, words, from, keys, out, width);
    }
  }
  for (int64_t h = 0; h < num_heads; ++h)
    for (int64_t j = begin; j < end; ++j) {
      float* own_logits = logits + (h * rows + (j - begin) * a.group) * width;
      const float* scales = a.k_scales.data == nullptr ? nullptr : key_scales + h * width;
      weigh_query(a, own_logits, width, heads[h].first_visible + j, scales, heads[h].weights + j * width);
    }
}

void add_weights(const AttentionMass& a, const MassQueries& x, int64_t begin, int64_t end) {
  for (int64_t block = begin; block < smaller(end, x.length); block += kMassBlock) switch (a.kind) {
      case 1: add<1>(a, x, block); break;
      case 3: add<3>(a, x, block); break;
      default: add<0>(a, x, block);
    }
}

}  // namespace KVFORGE_ISA
}  // namespace kvforge
