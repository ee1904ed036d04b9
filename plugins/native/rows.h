// Rows of numbers, between the tensors' types and float, and between places in memory.
// Used by files that are compiled once per instruction set: everything here has internal linkage.
#pragma once

#include <cstdint>
#include <cstring>

#include "native/cast.h"

namespace {

template <typename Element>
inline void widen(const Element* __restrict__ from, float* __restrict__ to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = to_float(from[i]);
}

template <typename Element>
inline void narrow(const float* __restrict__ from, Element* __restrict__ to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) store(to + i, from[i]);
}

// The first `count` numbers of each row.
inline void copy_rows(
    const float* from, int64_t from_stride, float* to, int64_t to_stride, int64_t rows, int64_t count) {
  for (int64_t i = 0; i < rows; ++i) std::memcpy(to + i * to_stride, from + i * from_stride, count * sizeof(float));
}

}  // namespace
