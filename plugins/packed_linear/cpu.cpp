// kvforge::packed_linear on CPU: checks, then tiles of rows times panels of the weight.
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <optional>

#include "native/checks.h"
#include "native/dynamic_for.h"
#include "native/empty.h"
#include "native/ranged_for.h"
#include "native/workspace.h"
#include "packed_linear/cpu_product.h"
#include "packed_linear/cpu_weights.h"

namespace kvforge {
namespace {

constexpr const char* kOp = "packed_linear";
constexpr int64_t kFewRows = 16;        // up to here every thread prepares all rows for itself
constexpr int64_t kPreparedRows = 16;   // rows of a piece of preparation, whole bands
constexpr int64_t kProductsPerThread = 1 << 18;  // multiplications that pay for waking a thread

void check_bf16(const char* name, const at::Tensor& t) {
  TORCH_CHECK(t.scalar_type() == at::kBFloat16, kOp, ": ", name, " must be bfloat16, not ", t.scalar_type());
}

// A bfloat16 vector of the given length, contiguous in the result; undefined when there is none.
at::Tensor vector(const char* name, const std::optional<at::Tensor>& t, int64_t length) {
  if (!t.has_value()) return {};
  check_bf16(name, *t);
  TORCH_CHECK(t->dim() == 1 && t->size(0) == length, kOp, ": ", name, " must have shape [", length, "], not ",
              t->sizes());
  return t->contiguous();
}

void check_matrix(const char* name, const at::Tensor& t) {
  check_dims(kOp, name, t, 2);
  check_bf16(name, t);
  TORCH_CHECK(t.stride(1) == 1 || t.size(1) == 1, kOp, ": ", name, " must be contiguous in its last dimension");
}

const uint16_t* data(const at::Tensor& t) {
  return t.defined() ? static_cast<const uint16_t*>(t.const_data_ptr()) : nullptr;
}

// How rows come to be prepared: not at all, by all threads before the first product, or by each thread what it needs:
// all rows where they are few, a block of rows at a time where every thread has several.
enum class Preparing { none, together, all, blocks };

Preparing preparing(const LinearArgs& args, const LinearKernel& kernel, int64_t threads) {
  if (kernel.takes_x(args)) return Preparing::none;
  if (args.rows <= kFewRows) return Preparing::all;
  return args.rows >= 2 * rows_of_piece(args, kernel) * threads ? Preparing::blocks : Preparing::together;
}

// What one thread multiplies with: its sums and the rows that it prepares for itself.
class Worker {
 public:
  Worker(const Product& product, const LinearArgs& args, const LinearKernel& kernel, Preparing preparing,
         const char* rows, int64_t band_stride, int64_t sums_bytes)
      : product_(product), args_(args), kernel_(kernel), own_blocks_(preparing == Preparing::blocks),
        rows_per_piece_(rows_of_piece(args, kernel)), rows_(rows),
        band_stride_(band_stride) {
    thread_local Workspace workspace;
    const int64_t own_rows = own_blocks_ ? rows_per_piece_ : preparing == Preparing::all ? args.rows : 0;
    const int64_t own_bytes = (own_rows + kernel.band_rows - 1) / kernel.band_rows * band_stride;
    own_ = workspace.get(own_bytes + std::max(sums_bytes, scratch_bytes(args)));
    rest_ = own_ + own_bytes;  // band_stride is a multiple of 64
    if (preparing == Preparing::all) {
      kernel.prepare(args, 0, args.rows, own_, rest_);
      rows_ = own_;
    }
    if (kernel.enter != nullptr) kernel.enter();
  }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;
  ~Worker() {
    if (kernel_.leave != nullptr) kernel_.leave();
  }

  void operator()(int64_t piece, int64_t next) {
    const int64_t block = piece / args_.panels, begin = block * rows_per_piece_;
    if (own_blocks_ && block != prepared_) {
      kernel_.prepare(args_, begin, std::min(begin + rows_per_piece_, args_.rows), own_, rest_);
      rows_ = own_ - begin / kernel_.band_rows * band_stride_;
      prepared_ = block;
    }
    product_.run(piece, next, rows_, band_stride_, reinterpret_cast<float*>(rest_));
  }

 private:
  const Product& product_;
  const LinearArgs& args_;
  const LinearKernel& kernel_;
  const bool own_blocks_;
  const int64_t rows_per_piece_;
  const char* rows_;
  const int64_t band_stride_;
  char *own_, *rest_;
  int64_t prepared_ = -1;
};

void multiply(const LinearArgs& args, const LinearKernel& kernel, int64_t groups) {
  const Product product(args, kernel, groups);
  const int64_t threads = 1 + args.rows * args.depth * args.panels * kPanel / kProductsPerThread;
  const int64_t bands = (args.rows + kernel.band_rows - 1) / kernel.band_rows;
  const int64_t sums_bytes = std::min(bands * kernel.band_rows, rows_of_piece(args, kernel)) * kPanel * sizeof(float);
  const Preparing how = preparing(args, kernel, at::get_num_threads());
  const int64_t band_stride = how == Preparing::none ? args.x_stride * 2 : kernel.band_bytes(args);
  thread_local Workspace shared;  // the calling thread's
  const char* rows = reinterpret_cast<const char*>(args.x);
  if (how == Preparing::together) {
    char* const prepared = shared.get(bands * band_stride);
    rows = prepared;
    dynamic_for((args.rows + kPreparedRows - 1) / kPreparedRows, threads, [&](int64_t i) {
      thread_local Workspace workspace;
      const int64_t begin = i * kPreparedRows, end = std::min(begin + kPreparedRows, args.rows);
      kernel.prepare(args, begin, end, prepared + begin / kernel.band_rows * band_stride,
                     workspace.get(scratch_bytes(args)));
    });
  }
  ranged_for(product.pieces(), threads,
             [&] { return Worker(product, args, kernel, how, rows, band_stride, sums_bytes); });
}

}  // namespace

at::Tensor packed_linear(
    const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& scales_in,
    const std::optional<at::Tensor>& bias_in, const std::optional<at::Tensor>& norm_in,
    const std::optional<at::Tensor>& residual, int64_t out_features, double eps, bool gated, bool float32_out,
    bool rotated) {
  check_matrix("x", x);
  const int64_t rows = x.size(0), depth = x.size(1);
  TORCH_CHECK(depth > 0, kOp, ": x must have columns");
  TORCH_CHECK(out_features > 0, kOp, ": out_features must be positive, not ", out_features);
  const Weights weights = weights_of(kOp, weight);
  const int64_t width = gated ? kPanel / 2 : kPanel, panels = (out_features - 1) / width + 1;
  check_weight(kOp, weight, weights, {}, depth, panels);
  TORCH_CHECK(scales_in.has_value() == (weights != Weights::bf16), kOp,
              ": scales must be given with int8 and int4 weights, and only with them");
  TORCH_CHECK(!rotated || weights != Weights::bf16, kOp, ": rotated is for int8 and int4 weights");
  at::Tensor scales;
  if (scales_in.has_value())
    scales = float32_tensor(kOp, "scales", *scales_in, scales_shape(weights, panels));
  const at::Tensor bias = vector("bias", bias_in, out_features * (gated ? 2 : 1));
  const at::Tensor norm = vector("norm", norm_in, depth);
  if (residual.has_value()) {
    check_matrix("residual", *residual);
    TORCH_CHECK(residual->size(0) == rows && residual->size(1) == out_features, kOp, ": residual must have shape [",
                rows, ", ", out_features, "], not ", residual->sizes());
  }
  at::Tensor out = empty_tensor({rows, out_features}, float32_out ? at::kFloat : at::kBFloat16);
  if (rows == 0) return out;
  const float* const scale = scales.defined() ? scales.const_data_ptr<float>() : nullptr;
  multiply(
      {
          .x = data(x),
          .x_stride = x.stride(0),
          .rows = rows,
          .depth = depth,
          .outputs = out_features,
          .panels = panels,
          .weight = static_cast<const char*>(weight.const_data_ptr()),
          .weight_scales = scale,
          .weight_sums = weights == Weights::int8 ? scale + panels * kPanel : nullptr,
          .bias = data(bias),
          .norm = data(norm),
          .residual = residual.has_value() ? data(*residual) : nullptr,
          .residual_stride = residual.has_value() ? residual->stride(0) : 0,
          .out = out.mutable_data_ptr(),
          .eps = static_cast<float>(eps),
          .gated = gated,
          .float32_out = float32_out,
          .rotated = rotated,
      },
      linear_kernel(weights, rows), num_groups(weights, depth));
  return out;
}

}  // namespace kvforge
