// Keys of one KV head of one sequence: gathered rows of U times SV, rotated. Compiled once per instruction set
// into namespace KVFORGE_ISA, so no inline function with external linkage may be used here: the linker would
// keep one variant of it. A key's sum runs over the rank in order, whatever the other keys.
#include "low_rank_key_reconstruct/cpu_kernel.h"

#include "native/simd.h"

namespace kvforge {
namespace {

// out[r, 0 .. Vectors * kLanes) = u[r] b for Rows rows of `stride` floats; b is [rank, dim].
template <int Rows, int Vectors, typename T>
void multiply(const T* const* u, const T* b, int64_t rank, int64_t dim, float* out, int64_t stride) {
  vfloat acc[Rows][Vectors] = {};
  for (int64_t k = 0; k < rank; ++k, b += dim) {
    vfloat right[Vectors];
#pragma GCC unroll 2
    for (int j = 0; j < Vectors; ++j) right[j] = load(b + j * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      const float left = to_float(u[r][k]);
#pragma GCC unroll 2
      for (int j = 0; j < Vectors; ++j) acc[r][j] += left * right[j];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 2
    for (int j = 0; j < Vectors; ++j) store(out + r * stride + j * kLanes, acc[r][j]);
}

template <int Rows, typename T>
void multiply_all(const T* const* u, const T* b, int64_t rank, int64_t dim, float* out) {
  int64_t d = 0;
  for (; d + 2 * kLanes <= dim; d += 2 * kLanes) multiply<Rows, 2>(u, b + d, rank, dim, out + d, dim);
  for (; d + kLanes <= dim; d += kLanes) multiply<Rows, 1>(u, b + d, rank, dim, out + d, dim);
  for (; d < dim; ++d)
    for (int r = 0; r < Rows; ++r) {
      float sum = 0;
      for (int64_t k = 0; k < rank; ++k) sum += to_float(u[r][k]) * to_float(b[k * dim + d]);
      out[r * dim + d] = sum;
    }
}

template <typename T>
void rotate(const float* __restrict__ x, const float* __restrict__ cos, const float* __restrict__ sin,
            T* __restrict__ out, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    store(out + i, x[i] * cos[i] - x[i + half] * sin[i]);
    store(out + i + half, x[i + half] * cos[i] + x[i] * sin[i]);
  }
}

template <typename T>
void reconstruct(const KeyReconstruct& a, int64_t sequence, int64_t head, int64_t begin, int64_t end,
                 float* scratch) {
  const int64_t dim = a.head_dim, half = dim / 2;
  const T* sv = static_cast<const T*>(a.sv) + (sequence * a.kv_heads + head) * a.rank * dim;
  T* out = static_cast<T*>(a.out);
  const T* u[kReconstructRows];
  int64_t selected[kReconstructRows], count = 0;
  for (int64_t n = begin; n < end; ++n) {
    const int64_t index = n * a.kv_heads + head;
    if (a.rows[index] < 0) {
      std::memset(out + index * dim, 0, dim * sizeof(T));
    } else {
      u[count] = static_cast<const T*>(a.u) + a.rows[index] * a.rank;
      selected[count++] = index;
    }
    if (count < kReconstructRows && n + 1 < end) continue;
    if (count == kReconstructRows) multiply_all<kReconstructRows>(u, sv, a.rank, dim, scratch);
    else
      for (int64_t r = 0; r < count; ++r) multiply_all<1>(u + r, sv, a.rank, dim, scratch + r * dim);
    for (int64_t r = 0; r < count; ++r) {
      const int64_t row = a.positions[selected[r]] * half;
      rotate(scratch + r * dim, a.cos + row, a.sin + row, out + selected[r] * dim, half);
    }
    count = 0;
  }
}

}  // namespace

namespace KVFORGE_ISA {

void reconstruct_keys(const KeyReconstruct& args, int64_t sequence, int64_t head, int64_t begin, int64_t end,
                      float* scratch) {
  if (args.bf16) reconstruct<bf16>(args, sequence, head, begin, end, scratch);
  else reconstruct<float>(args, sequence, head, begin, end, scratch);
}

}  // namespace KVFORGE_ISA
}  // namespace kvforge
