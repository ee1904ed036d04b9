// What the operator's driver hands to its kernels. A *group* is 4 bytes of the depth, two bfloat16 or four int8: a
// panel of the weight has kPanel words for each group, a prepared row one word or what its kernel makes of it. With int4
// a group is 32 of the depth: their codes, then their steps or their scales as float16 and perhaps their zero points
// (packing.py says how they lie). A kernel's rows lie in *bands*, of one row or as many as its tiles have: group g of a band is at
// g * row_group_bytes * band_rows.
#pragma once

#include <cstdint>

namespace kvforge {

constexpr int64_t kPanel = 64;             // outputs of a panel
constexpr int64_t kGroupBytes = 4;         // of an output
constexpr int64_t kPanelGroupBytes = kPanel * kGroupBytes;
constexpr int64_t kInt4GroupDepth = 32;
// Of a panel: with the steps of a group, with its scales, with scales and zero points.
constexpr int64_t kInt4GroupBytes = kPanel * (kInt4GroupDepth / 2 + 1);
constexpr int64_t kInt4ScalesGroupBytes = kPanel * (kInt4GroupDepth / 2 + 2);
constexpr int64_t kInt4ZerosGroupBytes = kInt4ScalesGroupBytes + kPanel;

struct LinearArgs {
  const uint16_t* x;  // [rows, depth] bfloat16
  int64_t x_stride;   // elements from row to row
  int64_t rows, depth, outputs, panels;
  const char* weight;           // [panels, groups, panel_group_bytes], contiguous
  const float* weight_scales;   // [panels * kPanel], int8 and int4 only
  const float* weight_sums;     // [panels * kPanel], int8 only
  const uint16_t* bias;         // [outputs], gated [2 * outputs], or null
  const uint16_t* norm;         // [depth] or null
  const uint16_t* residual;     // [rows, outputs] or null
  int64_t residual_stride;
  void* out;  // [rows, outputs], contiguous, bfloat16 or float
  float eps;
  bool gated, float32_out;
  bool rotated = false;  // rows, before they are quantized
  // Where row r of the product is read in x and written in out, [rows] each, or null where it is row r of both; with
  // them there is no residual.
  const int32_t* x_row = nullptr;
  const int32_t* out_row = nullptr;
};

// Static, as files that are compiled for several instruction sets call them.
static inline const uint16_t* row_of_x(const LinearArgs& a, int64_t r) {
  return a.x + (a.x_row == nullptr ? r : a.x_row[r]) * a.x_stride;
}

static inline int64_t first_of_out(const LinearArgs& a, int64_t r) {
  return (a.out_row == nullptr ? r : a.out_row[r]) * a.outputs;
}

// Some prepared rows times a block of a panel's depth.
struct LinearTile {
  const char* rows;     // the first band's first group of the block
  int64_t band_stride;  // bytes
  int64_t num_rows;
  const char* weight;  // [groups, panel_group_bytes]
  int64_t groups;
  const char* next;    // the weights that are multiplied next, for prefetching, or null
  void* sums;          // [num_rows in whole bands, kPanel] float, or int32 for int8
  bool add;            // to what sums holds; else it is written
};

// Bytes that a kernel's prepare() may write beside its rows.
static inline int64_t scratch_bytes(const LinearArgs& a) { return a.depth * 4 + 64; }

// Whether weights that are read once, in order, are fetched by instructions. Zen 4's own prefetcher alone reads them as
// fast as memory gives them. Instructions, which wait for the few misses that the first-level cache may have under way,
// make that slower by a sixth to a third.
#if defined(__AVX512BF16__)
constexpr bool kFetchesInOrder = false;
#else
constexpr bool kFetchesInOrder = true;
#endif

// Of kernels whose rows are in tiles of 6: rows of up to three tiles, with which all of a block is fetched while the one
// before it is multiplied. On a Zen 5 the second-level cache would be too far for it: a miss that waits for memory there
// keeps one of the first level's few busy.
constexpr int64_t kFewRows = kFetchesInOrder ? 0 : 18;

// One weight dtype on one instruction set. Each sum runs over the depth in order, whatever the shape of the tile.
struct LinearKernel {
  int64_t band_rows = 1;
  int64_t row_group_bytes = kGroupBytes;  // of a prepared row
  int64_t panel_group_bytes = kPanelGroupBytes;
  int64_t depth_block = 512;  // groups that are multiplied before the next rows have their turn, a multiple of 16
  // The same for up to `few_rows` rows: a block, which the next one joins in the first-level cache.
  int64_t few_rows = 0, few_rows_depth_block = 64;
  // Rows of a piece, whole bands: with a depth block of them and of a panel, 192 fill half of the L2.
  int64_t row_block = 192;
  // Half as many rows are a piece where they would take more bytes than this, prepared, over their whole depth.
  int64_t piece_bytes = INT64_MAX;
  // Called by each thread before its first multiply() and after its last, or null.
  void (*enter)() = nullptr;
  void (*leave)() = nullptr;
  // Whether x can be multiplied where it is, without being prepared.
  bool (*takes_x)(const LinearArgs& args);
  // Bytes from one prepared band to the next.
  int64_t (*band_bytes)(const LinearArgs& args);
  // Writes rows [begin, end), normed, padded to whole groups and, for int8 and int4, quantized; begin is a band's first row, the
  // rows that the last band lacks become zeros. scratch: scratch_bytes().
  void (*prepare)(const LinearArgs& args, int64_t begin, int64_t end, char* rows, char* scratch);
  void (*multiply)(const LinearTile& tile);
  // Turns the sums of a panel (int32 of int8 weights) into those of the layer, in place, by the rows' and the outputs'
  // scales; rows are the whole prepared bands. Null: there is nothing to do.
  void (*dequantize)(const LinearArgs& args, const char* rows, int64_t band_stride, int64_t num_rows, int64_t panel,
                     void* sums) = nullptr;
  // Bias, gate, residual: writes the outputs of a panel for rows [begin, begin + num_rows) from their sums.
  void (*finish)(const LinearArgs& args, int64_t begin, int64_t num_rows, int64_t panel, const float* sums);
};

#define KVFORGE_LINEAR_KERNELS(isa)               \
  namespace isa {                                 \
  extern const LinearKernel linear_bf16_kernel;   \
  extern const LinearKernel linear_int8_kernel;   \
  extern const LinearKernel linear_int4_kernel;   \
  extern const LinearKernel linear_int4_scales_kernel; \
  extern const LinearKernel linear_int4_zeros_kernel; \
  void finish_linear(const LinearArgs& args, int64_t begin, int64_t num_rows, int64_t panel, const float* sums); \
  }

KVFORGE_LINEAR_KERNELS(isa_portable)
#if defined(__x86_64__)
KVFORGE_LINEAR_KERNELS(isa_avx2)
KVFORGE_LINEAR_KERNELS(isa_avx512)
KVFORGE_LINEAR_KERNELS(isa_avx512_vnni)
KVFORGE_LINEAR_KERNELS(isa_avx512_bf16)
KVFORGE_LINEAR_KERNELS(isa_amx_software)
KVFORGE_LINEAR_KERNELS(isa_amx)
#endif

}  // namespace kvforge
