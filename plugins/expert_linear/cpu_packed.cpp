// Rows are prepared expert by expert first; then a piece of the loop is a block of an expert's rows and a panel of its
// weight, so that experts with many rows and with few keep all threads busy together.
#include "expert_linear/cpu_packed.h"

#include <algorithm>

#include "native/dynamic_for.h"
#include "native/ranged_for.h"
#include "native/workspace.h"
#include "packed_linear/cpu_product.h"

namespace kvforge {
namespace {

constexpr int64_t kPreparedRows = 16;            // of a piece of preparation, whole bands
constexpr int64_t kPreparedPerThread = 1 << 16;  // elements that pay for waking a thread
constexpr int64_t kProductsPerThread = 1 << 18;  // multiplications that do

// An expert that has rows.
struct Part {
  LinearArgs args;
  int64_t first_piece, first_prepared, band;  // its first piece of products and of preparation, and its first band
};

// The part that a piece belongs to, of parts in ascending order.
template <typename First>
const Part& part_of(const std::vector<Part>& parts, int64_t piece, const First& first) {
  return *std::prev(std::upper_bound(parts.begin(), parts.end(), piece,
                                     [&](int64_t value, const Part& part) { return value < first(part); }));
}

// Experts that have rows.
int64_t num_used(const ExpertRows& rows) {
  int64_t count = 0;
  for (size_t e = 0; e + 1 < rows.start.size(); ++e) count += rows.start[e + 1] > rows.start[e];
  return count;
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// What one thread multiplies with.
class Worker {
 public:
  Worker(const std::vector<Part>& parts, const LinearKernel& kernel, int64_t groups, const char* bands,
         int64_t band_stride)
      : parts_(parts), kernel_(kernel), groups_(groups), bands_(bands), band_stride_(band_stride) {
    thread_local Workspace workspace;
    sums_ = reinterpret_cast<float*>(workspace.get(kernel.row_block * kPanel * sizeof(float)));
    if (kernel.enter != nullptr) kernel.enter();
  }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;
  ~Worker() {
    if (kernel_.leave != nullptr) kernel_.leave();
  }

  void operator()(int64_t piece, int64_t next) {
    const Part& part = part_of(parts_, piece, [](const Part& p) { return p.first_piece; });
    const Product product(part.args, kernel_, groups_);
    const int64_t own = piece - part.first_piece;
    const bool follows = next >= 0 && own + 1 < product.pieces();
    product.run(own, follows ? own + 1 : -1, bands_ + part.band * band_stride_, band_stride_, sums_);
  }

 private:
  const std::vector<Part>& parts_;
  const LinearKernel& kernel_;
  const int64_t groups_;
  const char* const bands_;
  const int64_t band_stride_;
  float* sums_;
};

}  // namespace

void multiply_experts(const LinearArgs& all, Weights weights, int64_t weight_bytes, int64_t num_scales,
                      const ExpertRows& rows) {
  const int64_t groups = num_groups(weights, all.depth), experts = static_cast<int64_t>(rows.start.size()) - 1;
  const int64_t rows_of_each = rows.start.back() / std::max<int64_t>(1, num_used(rows));
  const LinearKernel& kernel = linear_kernel(weights, rows_of_each);
  std::vector<Part> parts;
  int64_t pieces = 0, prepared = 0, bands = 0;
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t begin = rows.start[e], count = rows.start[e + 1] - begin;
    if (count == 0) continue;
    LinearArgs args = all;
    args.rows = count;
    args.weight += e * weight_bytes;
    if (args.weight_scales != nullptr) args.weight_scales += e * num_scales;
    if (args.weight_sums != nullptr) args.weight_sums += e * num_scales;
    args.x_row = rows.x_row.data() + begin;
    args.out_row = rows.out_row.data() + begin;
    parts.push_back({args, pieces, prepared, bands});
    pieces += Product(args, kernel, groups).pieces();
    prepared += ceil_div(count, kPreparedRows);
    bands += ceil_div(count, kernel.band_rows);
  }
  const int64_t band_stride = kernel.band_bytes(all), elements = rows.out_row.size() * all.depth;
  thread_local Workspace shared;  // the calling thread's
  char* const space = shared.get(bands * band_stride);
  dynamic_for(prepared, 1 + elements / kPreparedPerThread, [&](int64_t piece) {
    thread_local Workspace workspace;
    const Part& part = part_of(parts, piece, [](const Part& p) { return p.first_prepared; });
    const int64_t begin = (piece - part.first_prepared) * kPreparedRows;
    kernel.prepare(part.args, begin, std::min(begin + kPreparedRows, part.args.rows),
                   space + (part.band + begin / kernel.band_rows) * band_stride,
                   workspace.get(scratch_bytes(all)));
  });
  ranged_for(pieces, 1 + elements * all.panels * kPanel / kProductsPerThread,
             [&] { return Worker(parts, kernel, groups, space, band_stride); });
}

}  // namespace kvforge
