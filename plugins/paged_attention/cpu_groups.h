// Loops over rows by groups whose size is a constant: everything here has internal linkage.
#pragma once

#include <cstdint>
#include <type_traits>

namespace kvforge {
namespace {

// Calls body(row, count) for groups of 4, 2 and 1 rows. A row's sums do not depend on its group.
template <typename Body>
inline void in_groups(int64_t rows, const Body& body) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) body(r, std::integral_constant<int, 4>());
  if (r + 2 <= rows) body(r, std::integral_constant<int, 2>()), r += 2;
  if (r < rows) body(r, std::integral_constant<int, 1>());
}

}  // namespace
}  // namespace kvforge
