// A small matrix product in float32. Used by files that are compiled once per instruction set: everything here has
// internal linkage.
#pragma once

#include "native/simd.h"

namespace kvforge {
namespace {

#if defined(__AVX512F__)
constexpr int kGemmRows = 8;  // whose sums are held in registers
#else
constexpr int kGemmRows = 4;
#endif

template <int Rows, int Vectors>
inline void gemm_block(int64_t depth, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc,
                       bool add) {
  vfloat acc[Rows][Vectors];
#pragma GCC unroll 8
  for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) acc[i][j] = add ? load(c + i * ldc + j * kLanes) : vfloat{};
  for (int64_t k = 0; k < depth; ++k) {
    vfloat right[Vectors];
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) right[j] = load(b + k * ldb + j * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < Vectors; ++j) acc[i][j] += a[i * lda + k] * right[j];
  }
#pragma GCC unroll 8
  for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) store(c + i * ldc + j * kLanes, acc[i][j]);
}

template <int Rows>
inline void gemm_rows(int64_t columns, int64_t depth, const float* a, int64_t lda, const float* b, int64_t ldb,
                      float* c, int64_t ldc, bool add) {
  constexpr int kWide = Rows >= 4 ? 2 : 4;  // vectors
  int64_t j = 0;
  for (; j + kWide * kLanes <= columns; j += kWide * kLanes)
    gemm_block<Rows, kWide>(depth, a, lda, b + j, ldb, c + j, ldc, add);
  for (; j < columns; j += kLanes) gemm_block<Rows, 1>(depth, a, lda, b + j, ldb, c + j, ldc, add);
}

// C[rows, columns] (+)= A[rows, depth] B[depth, columns]; columns a multiple of kLanes. Each element is summed in the
// order of the depth, whatever the shape.
inline void gemm(int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t lda, const float* b, int64_t ldb,
                 float* c, int64_t ldc, bool add) {
  int64_t i = 0;
  for (; i + kGemmRows <= rows; i += kGemmRows)
    gemm_rows<kGemmRows>(columns, depth, a + i * lda, lda, b, ldb, c + i * ldc, ldc, add);
  if constexpr (kGemmRows > 4)
    for (; i + 4 <= rows; i += 4) gemm_rows<4>(columns, depth, a + i * lda, lda, b, ldb, c + i * ldc, ldc, add);
  for (; i + 2 <= rows; i += 2) gemm_rows<2>(columns, depth, a + i * lda, lda, b, ldb, c + i * ldc, ldc, add);
  if (i < rows) gemm_rows<1>(columns, depth, a + i * lda, lda, b, ldb, c + i * ldc, ldc, add);
}

}  // namespace
}  // namespace kvforge
