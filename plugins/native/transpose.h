// A square of 32-bit words turned around in vectors. Used by files that are compiled once per instruction set: everything
// here has internal linkage.
#pragma once

#include "native/simd.h"

namespace {

template <int Width>
inline void exchange(vint* x) {
  const vint lane = iota();
  const vint is_high = (lane & Width) != 0;
  const vint low = is_high ? lane + (kLanes - Width) : lane, high = is_high ? lane + kLanes : lane + Width;
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i)
    if ((i & Width) == 0) {
      const vint a = x[i], b = x[i + Width];
      x[i] = __builtin_shuffle(a, b, low);
      x[i + Width] = __builtin_shuffle(a, b, high);
    }
}

// Word j of vector i becomes word i of vector j, of kLanes vectors.
inline void transpose(vint* x) {
  if constexpr (kLanes > 8) exchange<8>(x);
  if constexpr (kLanes > 4) exchange<4>(x);
  exchange<2>(x);
  exchange<1>(x);
}

}  // namespace
