// Loops over rows by groups whose size is a constant: everything here has internal linkage.
#pragma once

#include <cstdint>

namespace kvforge {
namespace {

template <int N>
struct Count {
  static constexpr int value = N;
};

// Calls body(row, Count) for groups of 4, 2 and 1 rows. A row's sums do not depend on its group.
template <typename Body>
inline void in_groups(int64_t rows, const Body& body) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) body(r, Count<4>());
  if (r + 2 <= rows) body(r, Count<2>()), r += 2;
  if (r < rows) body(r, Count<1>());
}

}  // namespace
}  // namespace kvforge
