// For files that are compiled once per instruction set, as native/simd.h.
#pragma once

#include "native/simd.h"

namespace {

// a * b + c, fused where the instruction set has it, whatever the compiler would fuse: for results that may not depend on
// where a step ends.
inline vfloat multiply_add(vfloat a, vfloat b, vfloat c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

}  // namespace
