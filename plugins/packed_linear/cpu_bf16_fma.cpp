// bfloat16 weights without AVX512-BF16: rows are prepared as float32, weights widened on the way, and small tiles of
// rows keep their sums in registers. A block of a panel fits into the L1 cache beside a tile's rows.
// Compiled once per instruction set into namespace KVFORGE_ISA, so no inline function with external linkage may be used
// here.
#include "packed_linear/cpu_kernel.h"
#include "packed_linear/cpu_norm.h"

namespace kvforge {
namespace {

// The sums of a tile that leave registers for a group's weights and a value of a row; more of them GCC 12 spills.
constexpr int kSums = kLanes == 16 ? 24 : 10;
constexpr int64_t kTileRows = kLanes == 16 ? 6 : 5;
constexpr int kPanelVectors = kPanel / kLanes;
constexpr int64_t kLine = 64;
constexpr int64_t kAhead = 4096;  // bytes that a tile alone fetches ahead of itself
constexpr int64_t kRowGroupBytes = 2 * sizeof(float);

// Vectors of a tile's width.
constexpr int width_of(int rows) {
  int width = kPanelVectors;
  while (width > 1 && width * rows > kSums) width /= 2;
  return width;
}

// sums[Rows, Width vectors] (+)= rows times weights, each in the order of the depth; fetches `Lines` lines of `next` per
// group.
template <int Rows, int Lines>
void multiply_rows(const LinearTile& t, const char* rows, const char* weight, const char* next, float* sums) {
  constexpr int kWidth = width_of(Rows);
  const int64_t row_floats = t.band_stride / static_cast<int64_t>(sizeof(float));
  const float* left = reinterpret_cast<const float*>(rows);
  vfloat acc[Rows][kWidth];
#pragma GCC unroll 8
  for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 16
    for (int j = 0; j < kWidth; ++j) acc[i][j] = t.add ? load(sums + i * kPanel + j * kLanes) : vfloat{};
  for (int64_t g = 0; g < t.groups; ++g, left += 2, weight += kPanelGroupBytes, next += Lines * kLine) {
#pragma GCC unroll 4
    for (int j = 0; j < Lines; ++j) __builtin_prefetch(next + j * kLine, 0, 2);
#pragma GCC unroll 2
    for (int k = 0; k < 2; ++k) {
      vfloat right[kWidth];
#pragma GCC unroll 16
      for (int j = 0; j < kWidth; ++j) {
        vint pair;
        std::memcpy(&pair, weight + j * sizeof pair, sizeof pair);
        right[j] = reinterpret_cast<vfloat>(k == 0 ? pair << 16 : pair & static_cast<int32_t>(0xffff0000));
      }
#pragma GCC unroll 8
      for (int i = 0; i < Rows; ++i) {
        const vfloat value = broadcast(left[i * row_floats + k]);
#pragma GCC unroll 16
        for (int j = 0; j < kWidth; ++j) acc[i][j] += value * right[j];
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 16
    for (int j = 0; j < kWidth; ++j) store(sums + i * kPanel + j * kLanes, acc[i][j]);
}

// A tile as wide as the panel: strips side by side, of which the first fetch lines of what is next.
template <int Rows>
void multiply_panel(const LinearTile& t, const char* rows, int64_t* fetched, float* sums) {
  constexpr int kWidth = width_of(Rows);
  constexpr int64_t kLines = kPanelGroupBytes / kLine;
  for (int j = 0; j < kPanelVectors; j += kWidth) {
    const char* weight = t.weight + j * kLanes * kGroupBytes;
    if (t.num_rows <= kTileRows && kWidth == kPanelVectors) {
      multiply_rows<Rows, kLines>(t, rows, weight, t.weight + kAhead, sums + j * kLanes);
    } else if (t.next != nullptr && *fetched < kLines) {
      multiply_rows<Rows, 1>(t, rows, weight, t.next + *fetched * t.groups * kLine, sums + j * kLanes);
      ++*fetched;
    } else {
      multiply_rows<Rows, 0>(t, rows, weight, nullptr, sums + j * kLanes);
    }
  }
}

// The rows in tiles of about the same height.
void multiply(const LinearTile& t) {
  const int64_t tiles = (t.num_rows + kTileRows - 1) / kTileRows;
  int64_t fetched = 0;
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t begin = t.num_rows * i / tiles, count = t.num_rows * (i + 1) / tiles - begin;
    const char* rows = t.rows + begin * t.band_stride;
    float* sums = static_cast<float*>(t.sums) + begin * kPanel;
    switch (count) {
      case 1: multiply_panel<1>(t, rows, &fetched, sums); break;
      case 2: multiply_panel<2>(t, rows, &fetched, sums); break;
      case 3: multiply_panel<3>(t, rows, &fetched, sums); break;
      case 4: multiply_panel<4>(t, rows, &fetched, sums); break;
      case 5: multiply_panel<5>(t, rows, &fetched, sums); break;
      default: multiply_panel<kTileRows>(t, rows, &fetched, sums);
    }
  }
}

bool takes_x(const LinearArgs&) { return false; }

// An odd number of cache lines, so that the same place of many rows is not in the same set of the cache.
int64_t row_bytes(const LinearArgs& a) { return (((a.depth + 1) / 2 * kRowGroupBytes + 63) / 64 | 1) * 64; }

void prepare(const LinearArgs& a, int64_t begin, int64_t end, char* rows, char* scratch) {
  bf16* normed = reinterpret_cast<bf16*>(scratch);
  for (int64_t r = begin; r < end; ++r, rows += row_bytes(a)) {
    float* out = reinterpret_cast<float*>(rows);
    const bf16* x = row_of_x(a, r);
    if (a.norm != nullptr) rms_norm(x, a.norm, a.depth, a.eps, normed);
    const bf16* from = a.norm != nullptr ? normed : x;
    for (int64_t i = 0; i < a.depth; ++i) out[i] = to_float(from[i]);
    if (a.depth % 2 != 0) out[a.depth] = 0;
  }
}

}  // namespace

namespace KVFORGE_ISA {
extern const LinearKernel linear_bf16_kernel = {
    .row_group_bytes = kRowGroupBytes,
    .depth_block = 64,
    .takes_x = takes_x,
    .band_bytes = row_bytes,
    .prepare = prepare,
    .multiply = multiply,
    .finish = finish_linear,
};
}

}  // namespace kvforge
