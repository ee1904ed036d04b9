// kvforge::seal_pages on CPU: checks, then one page and KV head after the other.
#include <ATen/core/Tensor.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "native/cast.h"
#include "native/checks.h"
#include "native/dynamic_for.h"
#include "native/sealed_pages.h"
#include "native/workspace.h"

namespace kvforge {
namespace {

constexpr const char* kOp = "seal_pages";
constexpr float kLeastStep = 0x1p-14f;           // the smallest normal float16
constexpr int64_t kNumbersPerThread = 1 << 14;  // that pay for waking a thread

// What 32 lines of a matrix are quantized with, column by column.
struct Columns {
  float *least, *largest, *step;
  int32_t* is_nan;
  uint8_t* codes;  // [32, columns]

  static int64_t bytes(int64_t columns) { return columns * (4 * 4 + kGroup); }
  Columns(char* scratch, int64_t columns)
      : least(reinterpret_cast<float*>(scratch)),
        largest(least + columns),
        step(largest + columns),
        is_nan(reinterpret_cast<int32_t*>(step + columns)),
        codes(reinterpret_cast<uint8_t*>(is_nan + columns)) {}
};

// Writes `Width` bits from bit `Low` on of a line's 16 codes to a tile's plane: the even columns' in the lower half of a word,
// the odd ones' in its upper half. In 4 bits the 8 right columns have a word behind those of all lines.
template <int Width, int Low>
inline void write_plane(const uint8_t* codes, int64_t line, uint8_t* plane) {
  constexpr int kHalf = Width == 1 ? 8 : 16, kColumns = 2 * kHalf / Width;
  for (int64_t first = 0; first < kTileSide; first += kColumns, plane += kTileSide * kHalf / 4) {
    uint32_t word = 0;
    for (int i = 0; i < kColumns; ++i)
      word |= static_cast<uint32_t>(codes[first + i] >> Low & ((1 << Width) - 1)) << (i % 2 * kHalf + i / 2 * Width);
    std::memcpy(plane + line * (kHalf / 4), &word, kHalf / 4);
  }
}

// 32 lines of `count` columns, at x: their tiles, of which `count / 16` are beside one another, and their group.
template <int Bits>
void quantize(const float* x, int64_t count, const Columns& c, uint8_t* tiles, c10::Half* group) {
  constexpr float kLast = (1 << Bits) - 1;
  constexpr int64_t kTile = kTileSide * kTileSide * Bits / 8;
  for (int64_t d = 0; d < count; ++d) {
    c.least[d] = std::numeric_limits<float>::infinity();
    c.largest[d] = -std::numeric_limits<float>::infinity();
    c.is_nan[d] = 0;
  }
  for (int64_t line = 0; line < kGroup; ++line)
    for (int64_t d = 0; d < count; ++d) {
      const float number = x[line * count + d];
      c.least[d] = number < c.least[d] ? number : c.least[d];
      c.largest[d] = number > c.largest[d] ? number : c.largest[d];
      c.is_nan[d] |= number != number;
    }
  for (int64_t d = 0; d < count; ++d) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    const c10::Half least(c.is_nan[d] ? nan : c.least[d] + 0.0f);  // of two zeros the positive one
    const float part = c10::Half((c.largest[d] - c.least[d]) / kLast);
    const c10::Half step(c.is_nan[d] ? nan : part < kLeastStep ? kLeastStep : part);
    group[d] = least;
    group[count + d] = step;
    c.least[d] = least;
    c.step[d] = step;
  }
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  for (int64_t line = 0; line < kGroup; ++line)
    for (int64_t d = 0; d < count; ++d) {
      const float y = (x[line * count + d] - c.least[d]) / c.step[d];
      const float bounded = y > 0.0f ? (y < kLast ? y : kLast) : 0.0f;  // of a NaN 0
      c.codes[line * count + d] = static_cast<uint8_t>(static_cast<int32_t>((bounded + kMagic) - kMagic));
    }
  for (int64_t line = 0; line < kGroup; ++line) {
    uint8_t* tile = tiles + line / kTileSide * (count / kTileSide) * kTile;
    for (int64_t d = 0; d < count; d += kTileSide, tile += kTile) {
      const uint8_t* codes = c.codes + line * count + d;
      write_plane<Bits == 3 ? 2 : Bits, 0>(codes, line % kTileSide, tile);
      if constexpr (Bits == 3) write_plane<1, 2>(codes, line % kTileSide, tile + kTileSide * 4);
    }
  }
}

// One KV head of a page, whose first token's K and V these are; tokens lie `row` apart.
template <int Bits, typename T>
void seal(const SealedLayout& p, const T* k, const T* v, int64_t row, uint8_t* k_codes, uint8_t* v_codes,
          c10::Half* k_groups, c10::Half* v_groups) {
  thread_local Workspace workspace;
  const int64_t size = p.page_size * p.head_dim, widest = std::max(p.page_size, p.head_dim);
  float* x = reinterpret_cast<float*>(workspace.get(size * sizeof(float) + Columns::bytes(widest)));
  const auto quantize_all = [&](int64_t lines, int64_t columns, uint8_t* codes, c10::Half* groups) {
    const Columns scratch(reinterpret_cast<char*>(x + size), columns);
    for (int64_t g = 0; g < lines / kGroup; ++g)
      quantize<Bits>(x + g * kGroup * columns, columns, scratch, codes + g * kGroup * columns * Bits / 8,
                     groups + g * 2 * columns);
  };
  for (int64_t t = 0; t < p.page_size; ++t)
    for (int64_t d = 0; d < p.head_dim; ++d) x[t * p.head_dim + d] = to_float(k[t * row + d]);
  quantize_all(p.page_size, p.head_dim, k_codes, k_groups);
  for (int64_t t = 0; t < p.page_size; ++t)
    for (int64_t d = 0; d < p.head_dim; ++d) x[d * p.page_size + t] = to_float(v[t * row + d]);
  quantize_all(p.head_dim, p.page_size, v_codes, v_groups);
}

}  // namespace

void seal_pages(const at::Tensor& exact_k, const at::Tensor& exact_v, const at::Tensor& seal_in, at::Tensor& k_codes,
                at::Tensor& v_codes, at::Tensor& k_groups, at::Tensor& v_groups) {
  const SealedLayout p = check_sealed_pages(kOp, exact_k, exact_v, k_codes, v_codes, k_groups, v_groups);
  const at::Tensor seal_rows = int32_tensor(kOp, "seal", seal_in, {-1, 2});
  const int32_t* row = seal_rows.const_data_ptr<int32_t>();
  std::vector<std::pair<int64_t, int64_t>> pairs;
  for (int64_t i = 0; i < seal_rows.size(0); ++i) {
    const int64_t exact = row[2 * i], page = row[2 * i + 1];
    if (exact < 0) continue;
    TORCH_CHECK(exact < exact_k.size(0), kOp, ": seal names exact page ", exact, " of ", exact_k.size(0));
    TORCH_CHECK(page >= 0 && page < k_codes.size(0), kOp, ": seal names page ", page, " of ", k_codes.size(0));
    pairs.emplace_back(exact, page);
  }
  uint8_t *kc = k_codes.mutable_data_ptr<uint8_t>(), *vc = v_codes.mutable_data_ptr<uint8_t>();
  auto *kg = k_groups.mutable_data_ptr<c10::Half>(), *vg = v_groups.mutable_data_ptr<c10::Half>();
  const int64_t count = static_cast<int64_t>(pairs.size()) * p.kv_heads;
  const auto run = [&](const auto* k, const auto* v) {
    dynamic_for(count, 1 + count * p.page_size * p.head_dim / kNumbersPerThread, [&](int64_t i) {
      const auto [exact, page] = pairs[i / p.kv_heads];
      const int64_t token = p.kv_heads * p.head_dim, head = i % p.kv_heads, to = page * p.kv_heads + head;
      const int64_t from = exact * p.page_size * token + head * p.head_dim;
      using T = std::decay_t<decltype(*k)>;
      const auto of_bits = p.bits == 2 ? seal<2, T> : p.bits == 3 ? seal<3, T> : seal<4, T>;
      of_bits(p, k + from, v + from, token, kc + to * p.codes(), vc + to * p.codes(), kg + to * p.groups(),
              vg + to * p.groups());
    });
  };
  const void *k = exact_k.const_data_ptr(), *v = exact_v.const_data_ptr();
  if (exact_k.scalar_type() == at::kFloat) run(static_cast<const float*>(k), static_cast<const float*>(v));
  else run(static_cast<const bf16*>(k), static_cast<const bf16*>(v));
}

}  // namespace kvforge
