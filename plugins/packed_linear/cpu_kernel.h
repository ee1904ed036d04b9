// What the operator's driver hands to its kernels. A *group* is 4 bytes of the depth, two bfloat16 or four int8: a
// prepared row has a word for each group, a panel of the weight kPanel words.
#pragma once

#include <cstdint>

namespace kvforge {

constexpr int64_t kPanel = 64;             // outputs of a panel
constexpr int64_t kGroupBytes = 4;         // of a row
constexpr int64_t kPanelGroupBytes = kPanel * kGroupBytes;

struct LinearArgs {
  const uint16_t* x;  // [rows, depth] bfloat16
  int64_t x_stride;   // elements from row to row
  int64_t rows, depth, outputs, panels;
  const char* weight;           // [panels, groups, kPanel, 4 bytes], contiguous
  const float* weight_scales;   // [panels * kPanel], int8 only
  const float* weight_sums;     // [panels * kPanel], int8 only
  const uint16_t* bias;         // [outputs], gated [2 * outputs], or null
  const uint16_t* norm;         // [depth] or null
  const uint16_t* residual;     // [rows, outputs] or null
  int64_t residual_stride;
  void* out;  // [rows, outputs], contiguous, bfloat16 or float
  float eps;
  bool gated, float32_out;
};

// Some prepared rows times a block of a panel's depth.
struct LinearTile {
  const char* rows;    // the first row's first word of the block
  int64_t row_stride;  // bytes
  int64_t num_rows;
  const char* weight;  // [groups, kPanel, 4 bytes]
  int64_t groups;
  const char* next;    // the weights that are multiplied next, for prefetching, or null
  void* sums;          // [num_rows, kPanel] float, or int32 for int8
  bool add;            // to what sums holds; else it is written
};

// One weight dtype on one instruction set. Each sum runs over the depth in order, whatever the shape of the tile.
struct LinearKernel {
  // Whether x can be multiplied where it is, without being prepared.
  bool (*takes_x)(const LinearArgs& args);
  // Bytes from one prepared row to the next.
  int64_t (*row_bytes)(const LinearArgs& args);
  // Writes rows [begin, end), normed, padded to whole groups and, for int8, quantized; scratch: depth * 2 bytes.
  void (*prepare)(const LinearArgs& args, int64_t begin, int64_t end, char* rows, char* scratch);
  void (*multiply)(const LinearTile& tile);
  // Turns the int32 sums of a panel into float, in place; rows are the whole prepared rows. Null: they are float.
  void (*dequantize)(const LinearArgs& args, const char* rows, int64_t row_stride, int64_t num_rows, int64_t panel,
                     void* sums);
  // Bias, gate, residual: writes the outputs of a panel for rows [begin, begin + num_rows) from their sums.
  void (*finish)(const LinearArgs& args, int64_t begin, int64_t num_rows, int64_t panel, const float* sums);
};

#define KVFORGE_LINEAR_KERNELS(isa)               \
  namespace isa {                                 \
  extern const LinearKernel linear_bf16_kernel;   \
  extern const LinearKernel linear_int8_kernel;   \
  void finish_linear(const LinearArgs& args, int64_t begin, int64_t num_rows, int64_t panel, const float* sums); \
  }

KVFORGE_LINEAR_KERNELS(isa_portable)
#if defined(__x86_64__)
KVFORGE_LINEAR_KERNELS(isa_avx2)
KVFORGE_LINEAR_KERNELS(isa_avx512)
#endif

}  // namespace kvforge
