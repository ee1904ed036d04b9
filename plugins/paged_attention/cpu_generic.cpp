// The kernel in float32 arithmetic for every dtype and head_dim. Compiled once per instruction set into
// namespace KVFORGE_ISA, so no inline function with external linkage may be used here: the linker would keep
// one variant of it. Per row, sums run in an order that depends on key positions only.
#include "native/simd.h"
#include "paged_attention/cpu_kernel.h"
#include "paged_attention/cpu_rows.h"

namespace kvforge {
namespace {

constexpr int64_t kKeysAtOnce = 4;  // in the direct part, whose values are added together
constexpr int64_t kStrip = 16;      // rows of a tile that are worked on at once
#if defined(__AVX512F__)
constexpr int64_t kGemmRows = 8;  // and of these, rows whose sums are held in registers
#else
constexpr int64_t kGemmRows = 4;
#endif

// head_dim rounded up to whole vectors of every instruction set.
int64_t padded_dim(const AttentionArgs& a) { return round_up(a.head_dim, 16); }

// C[kGemmRows, Vectors * kLanes] (+)= A B with float32 A [., depth], B [depth, .].
template <int Vectors>
void gemm_block(int64_t depth, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc,
                bool add) {
  vfloat acc[kGemmRows][Vectors];
#pragma GCC unroll 8
  for (int i = 0; i < kGemmRows; ++i)
#pragma GCC unroll 2
    for (int j = 0; j < Vectors; ++j) acc[i][j] = add ? load(c + i * ldc + j * kLanes) : vfloat{};
  for (int64_t k = 0; k < depth; ++k) {
    vfloat right[Vectors];
#pragma GCC unroll 2
    for (int j = 0; j < Vectors; ++j) right[j] = load(b + k * ldb + j * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < kGemmRows; ++i)
#pragma GCC unroll 2
      for (int j = 0; j < Vectors; ++j) acc[i][j] += a[i * lda + k] * right[j];
  }
#pragma GCC unroll 8
  for (int i = 0; i < kGemmRows; ++i)
#pragma GCC unroll 2
    for (int j = 0; j < Vectors; ++j) store(c + i * ldc + j * kLanes, acc[i][j]);
}

// C[kStrip, columns] (+)= A B; columns a multiple of 16.
void gemm(int64_t columns, int64_t depth, const float* a, int64_t lda, const float* b, int64_t ldb, float* c,
          int64_t ldc, bool add) {
  int64_t j = 0;
  for (; j + 2 * kLanes <= columns; j += 2 * kLanes)
    for (int64_t i = 0; i < kStrip; i += kGemmRows)
      gemm_block<2>(depth, a + i * lda, lda, b + j, ldb, c + i * ldc + j, ldc, add);
  for (; j < columns; j += kLanes)
    for (int64_t i = 0; i < kStrip; i += kGemmRows)
      gemm_block<1>(depth, a + i * lda, lda, b + j, ldb, c + i * ldc + j, ldc, add);
}

template <typename T>
void copy_float(const T* __restrict__ x, float* __restrict__ out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = to_float(x[i]);
}

// The values of 8-bit elements.
template <typename T>
void dequantize(const T* x, float scale, float* out, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(out + i, load(x + i) * scale);
  for (; i < count; ++i) out[i] = to_float(x[i]) * scale;
}

void load_queries(const AttentionArgs& a, const Rows& rows, float* out) {
  for (int64_t r = rows.row_begin; r < rows.row_end; ++r, out += a.head_dim) {
    const int64_t offset = query_offset(a, rows, r);
    if (a.q_bf16) copy_float(static_cast<const bf16*>(a.q) + offset, out, a.head_dim);
    else copy_float(static_cast<const float*>(a.q) + offset, out, a.head_dim);
  }
}

// Turns scores[0 .. width) into exp(scale * score - top) for lanes [first, last) and 0 elsewhere, with top the
// larger of *top and the scaled scores; updates *top and returns the sum. first < last.
float softmax_row(float* scores, int64_t width, int64_t first, int64_t last, float scale, float* top) {
  vfloat highest = broadcast(*top);
  for (int64_t j = 0; j < width; j += kLanes) {
    const vint lane = iota() + static_cast<int32_t>(j);
    const vint seen = (lane >= static_cast<int32_t>(first)) & (lane < static_cast<int32_t>(last));
    const vfloat x = seen ? load(scores + j) * scale : broadcast(-__builtin_inff());
    store(scores + j, x);
    highest = maximum(x, highest);
  }
  *top = maximum(highest);
  vfloat total{};
  for (int64_t j = 0; j < width; j += kLanes) {
    const vfloat p = exp_nonpositive(load(scores + j) - *top);
    store(scores + j, p);
    total += p;
  }
  return sum(total);
}

void finish_row(const AttentionArgs& a, const Rows& rows, int64_t row, const float* acc, float top, float total,
                float* partial) {
  if (partial != nullptr) {
    float* target = partial + (row - rows.row_begin) * (a.head_dim + 2);
    std::memcpy(target, acc, a.head_dim * sizeof(float));
    target[a.head_dim] = top;
    target[a.head_dim + 1] = total;
    return;
  }
  const int64_t offset = token_head(a, rows, row) * a.head_dim;
  for (int64_t d = 0; d < a.head_dim; ++d) {
    if (a.q_bf16) store(static_cast<bf16*>(a.out) + offset + d, acc[d] / total);
    else store(static_cast<float*>(a.out) + offset + d, acc[d] / total);
  }
}

// Packed block: K transposed [head_dim, kKeyBlock], then V [kKeyBlock, padded_dim].
int64_t packed_bytes(const AttentionArgs& a) { return kKeyBlock * (a.head_dim + padded_dim(a)) * sizeof(float); }

template <typename Pool>
void pack_block(const AttentionArgs& a, const Rows& rows, int64_t begin, float* packed) {
  const int64_t first = larger(begin, rows.first_key), last = smaller(begin + kKeyBlock, rows.end_key);
  float* k_out = packed;
  float* v_out = packed + a.head_dim * kKeyBlock;
  if (last - first < kKeyBlock || padded_dim(a) != a.head_dim) std::memset(packed, 0, packed_bytes(a));
  int64_t k_offset[kKeyBlock], v_offset[kKeyBlock];
  key_offsets(a, a.k, rows.pages, first, last, k_offset);
  key_offsets(a, a.v, rows.pages, first, last, v_offset);
  const Pool* k_head = static_cast<const Pool*>(a.k.data) + rows.kv_head * a.k.head_stride;
  const Pool* v_head = static_cast<const Pool*>(a.v.data) + rows.kv_head * a.v.head_stride;
  const KeyScales k_scale(a, a.k_scales, a.k_scale, rows.pages, first, last);
  const KeyScales v_scale(a, a.v_scales, a.v_scale, rows.pages, first, last);
  constexpr int64_t kStrip = 16;  // keys whose transposed cache lines are written together
  for (int64_t strip = first; strip < last; strip += kStrip) {
    const int64_t stop = smaller(last, strip + kStrip);
    const auto transpose = [&](const auto* const* keys) {
      for (int64_t d = 0; d < a.head_dim; ++d)
        for (int64_t key = strip; key < stop; ++key)
          k_out[d * kKeyBlock + key - begin] = to_float(keys[key - strip][d]);
    };
    const Pool* keys[kStrip];
    for (int64_t key = strip; key < stop; ++key) keys[key - strip] = k_head + k_offset[key - first];
    if constexpr (sizeof(Pool) == 1) {
      const float* values[kStrip];  // in the place of the V rows, which are written later
      for (int64_t key = strip; key < stop; ++key) {
        float* value = v_out + (key - begin) * padded_dim(a);
        dequantize(keys[key - strip], k_scale(key - first, rows.kv_head), value, a.head_dim);
        values[key - strip] = value;
      }
      transpose(values);
    } else {
      transpose(keys);
    }
  }
  for (int64_t key = first; key < last; ++key) {
    const Pool* v = v_head + v_offset[key - first];
    float* out = v_out + (key - begin) * padded_dim(a);
    if constexpr (sizeof(Pool) == 1) dequantize(v, v_scale(key - first, rows.kv_head), out, a.head_dim);
    else copy_float(v, out, a.head_dim);
  }
}

void pack(const AttentionArgs& a, const Rows& rows, int64_t begin, char* packed) {
  float* out = reinterpret_cast<float*>(packed);
  switch (a.pool) {
    case Dtype::float32: return pack_block<float>(a, rows, begin, out);
    case Dtype::bfloat16: return pack_block<bf16>(a, rows, begin, out);
    case Dtype::fp8: return pack_block<fp8>(a, rows, begin, out);
    case Dtype::int8: return pack_block<int8_t>(a, rows, begin, out);
  }
}

int64_t scratch_bytes(const AttentionArgs& a, int64_t rows) {
  const int64_t tile = kTileRows * (a.head_dim + padded_dim(a)) + kStrip * kKeyBlock;
  const int64_t direct = rows * (a.head_dim + kKeyBlock + padded_dim(a) + 2) + kKeysAtOnce * a.head_dim;
  return larger(tile * sizeof(float) + packed_bytes(a), direct * sizeof(float));
}

void tile(const AttentionArgs& a, const Rows& rows, int64_t begin, int64_t end, const char* packed, char* scratch,
          float* partial) {
  const int64_t count = num_rows(rows), padded = round_up(count, kStrip), dim = padded_dim(a);
  float* q = reinterpret_cast<float*>(scratch);
  float* scores = q + kTileRows * a.head_dim;  // of one strip
  float* acc = scores + kStrip * kKeyBlock;
  char* own = reinterpret_cast<char*>(acc + kTileRows * dim);
  float top[kTileRows], total[kTileRows];
  load_queries(a, rows, q);
  std::memset(q + count * a.head_dim, 0, (padded - count) * a.head_dim * sizeof(float));
  std::memset(acc, 0, padded * dim * sizeof(float));
  for (int64_t r = 0; r < count; ++r) {
    top[r] = -__builtin_inff();
    total[r] = 0;
  }
  for (int64_t block = begin / kKeyBlock * kKeyBlock; block < end; block += kKeyBlock) {
    if (packed == nullptr) pack(a, rows, block, own);
    const float* k = reinterpret_cast<const float*>(packed == nullptr ? own : packed);
    const float* v = k + a.head_dim * kKeyBlock;
    if (packed != nullptr) packed += packed_bytes(a);
    for (int64_t strip = 0; strip < count; strip += kStrip) {
      const int64_t stop = smaller(strip + kStrip, count);
      // The strip's last row sees the most keys; the strip's work ends where these end.
      const int64_t seen = smaller(smaller(end, block + kKeyBlock), position(a, rows, rows.row_begin + stop - 1) + 1);
      if (seen <= block) continue;
      const int64_t width = round_up(seen - block, 16);
      gemm(width, a.head_dim, q + strip * a.head_dim, a.head_dim, k, kKeyBlock, scores, kKeyBlock, false);
      for (int64_t r = strip; r < strip + kStrip; ++r) {
        float* row = scores + (r - strip) * kKeyBlock;
        int64_t first = 0, last = 0;
        if (r < stop)
          visible_keys(a, position(a, rows, rows.row_begin + r), larger(begin, block), seen, &first, &last);
        if (first >= last) {
          std::memset(row, 0, width * sizeof(float));
          continue;
        }
        const float before = top[r];
        const float fresh = softmax_row(row, width, first - block, last - block, a.scale, &top[r]);
        if (top[r] == before) {
          total[r] += fresh;
          continue;
        }
        const float shrink = __builtin_expf(before - top[r]);
        total[r] = total[r] * shrink + fresh;
        for (int64_t d = 0; d < dim; ++d) acc[r * dim + d] *= shrink;
      }
      gemm(dim, width, scores, kKeyBlock, v, dim, acc + strip * dim, dim, true);
    }
  }
  for (int64_t r = 0; r < count; ++r)
    finish_row(a, rows, rows.row_begin + r, acc + r * dim, top[r], total[r], partial);
}

template <typename Pool>
float dot(const float* q, const Pool* k, int64_t dim) {
  vfloat acc[2] = {};
  int64_t d = 0;
  for (; d + 2 * kLanes <= dim; d += 2 * kLanes) {
    acc[0] += load(q + d) * load(k + d);
    acc[1] += load(q + d + kLanes) * load(k + d + kLanes);
  }
  for (; d + kLanes <= dim; d += kLanes) acc[0] += load(q + d) * load(k + d);
  float result = sum(acc[0] + acc[1]);
  for (; d < dim; ++d) result += q[d] * to_float(k[d]);
  return result;
}

// acc += sum of weights[i] * v[i] over Keys keys.
template <int Keys, typename Pool>
void add_weighted(const float* weights, const Pool* const* v, float* acc, int64_t dim) {
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) {
    vfloat x = load(acc + d);
#pragma GCC unroll 4
    for (int i = 0; i < Keys; ++i) x += weights[i] * load(v[i] + d);
    store(acc + d, x);
  }
  for (; d < dim; ++d)
    for (int i = 0; i < Keys; ++i) acc[d] += weights[i] * to_float(v[i][d]);
}

template <typename Pool>
void direct_block(const AttentionArgs& a, const DirectWork& work, char* scratch) {
  const auto [heads, count, begin, end, split] = work;
  const int64_t rows = num_rows(heads[0]), all = rows * count, keys = end - begin, dim = a.head_dim;
  float* q = reinterpret_cast<float*>(scratch);
  float* scores = q + all * dim;
  float* acc = scores + all * kKeyBlock;
  int64_t k_offset[kKeyBlock], v_offset[kKeyBlock];
  key_offsets(a, a.k, heads[0].pages, begin, end, k_offset);
  key_offsets(a, a.v, heads[0].pages, begin, end, v_offset);
  const KeyScales k_scale(a, a.k_scales, a.k_scale, heads[0].pages, begin, end);
  const KeyScales v_scale(a, a.v_scales, a.v_scale, heads[0].pages, begin, end);
  float* top = acc + all * dim;
  float* total = top + all;
  float* values = total + all;  // of 8-bit elements
  for (int64_t h = 0; h < count; ++h) load_queries(a, heads[h], q + h * rows * dim);
  std::memset(acc, 0, all * dim * sizeof(float));
  // Keys outside, heads inside: the pools are read in the order they lie in memory.
  for (int64_t key = 0; key < keys; ++key)
    for (int64_t h = 0; h < count; ++h) {
      const Pool* k = static_cast<const Pool*>(a.k.data) + k_offset[key] + heads[h].kv_head * a.k.head_stride;
      const auto score = [&](const auto* value) {
        for (int64_t r = h * rows; r < (h + 1) * rows; ++r)
          scores[r * kKeyBlock + key] = dot(q + r * dim, value, dim);
      };
      if constexpr (sizeof(Pool) == 1) {
        dequantize(k, k_scale(key, heads[h].kv_head), values, dim);
        score(values);
      } else {
        score(k);
      }
    }
  for (int64_t r = 0; r < all; ++r) {
    const Rows& head = heads[r / rows];
    int64_t first, last;
    visible_keys(a, position(a, head, head.row_begin + r % rows), begin, end, &first, &last);
    float* row = scores + r * kKeyBlock;
    top[r] = -__builtin_inff();
    total[r] = 0;
    if (first < last)
      total[r] = softmax_row(row, round_up(keys, kLanes), first - begin, last - begin, a.scale, &top[r]);
    else
      std::memset(row, 0, keys * sizeof(float));
  }
  for (int64_t key = 0; key < keys; key += kKeysAtOnce)
    for (int64_t h = 0; h < count; ++h) {
      const Pool* v[kKeysAtOnce];
      const int64_t group = smaller(kKeysAtOnce, keys - key);
      for (int64_t i = 0; i < group; ++i)
        v[i] = static_cast<const Pool*>(a.v.data) + v_offset[key + i] + heads[h].kv_head * a.v.head_stride;
      const auto add = [&](const auto* const* value) {
        for (int64_t r = h * rows; r < (h + 1) * rows; ++r) {
          const float* weights = scores + r * kKeyBlock + key;
          if (group == kKeysAtOnce) add_weighted<kKeysAtOnce>(weights, value, acc + r * dim, dim);
          else
            for (int64_t i = 0; i < group; ++i) add_weighted<1>(weights + i, value + i, acc + r * dim, dim);
        }
      };
      if constexpr (sizeof(Pool) == 1) {
        const float* value[kKeysAtOnce];
        for (int64_t i = 0; i < group; ++i) {
          value[i] = values + i * dim;
          dequantize(v[i], v_scale(key + i, heads[h].kv_head), values + i * dim, dim);
        }
        add(value);
      } else {
        add(v);
      }
    }
  for (int64_t r = 0; r < all; ++r) {
    const Rows& head = heads[r / rows];
    float* partial = head.partial == nullptr ? nullptr : head.partial + split * rows * (dim + 2);
    finish_row(a, head, head.row_begin + r % rows, acc + r * dim, top[r], total[r], partial);
  }
}

void direct(const AttentionArgs& a, const DirectWork& work, const DirectWork*, char* scratch) {
  switch (a.pool) {
    case Dtype::float32: return direct_block<float>(a, work, scratch);
    case Dtype::bfloat16: return direct_block<bf16>(a, work, scratch);
    case Dtype::fp8: return direct_block<fp8>(a, work, scratch);
    case Dtype::int8: return direct_block<int8_t>(a, work, scratch);
  }
}

// The result of the rows from their partial results, added in the order of the keys.
void merge(const AttentionArgs& args, const Rows& rows, int64_t splits) {
  const int64_t count = num_rows(rows), dim = args.head_dim, stride = dim + 2;
  for (int64_t r = 0; r < count; ++r) {
    float* acc = rows.partial + r * stride;
    float top = -__builtin_inff(), total = 0;
    for (int64_t s = 0; s < splits; ++s) {
      const float other = acc[s * count * stride + dim];
      top = top < other ? other : top;
    }
    for (int64_t s = 0; s < splits; ++s) {
      const float* part = acc + s * count * stride;
      const float weight = part[dim + 1] == 0 ? 0.0f : __builtin_expf(part[dim] - top);
      total += weight * part[dim + 1];
      if (s == 0)
        for (int64_t d = 0; d < dim; ++d) acc[d] *= weight;
      else
        for (int64_t d = 0; d < dim; ++d) acc[d] += weight * part[d];
    }
    finish_row(args, rows, rows.row_begin + r, acc, top, total, nullptr);
  }
}

}  // namespace

namespace KVFORGE_ISA {

extern const AttentionKernel generic_kernel = {packed_bytes, scratch_bytes, pack, tile, direct, merge, false};

}  // namespace KVFORGE_ISA
}  // namespace kvforge
