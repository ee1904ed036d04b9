// Which rows go to which expert, in the order of the experts.
#pragma once

#include <cstdint>
#include <numeric>
#include <vector>

namespace kvforge {

// Rows of the result, token * k + place, sorted by expert; those of expert e are [start[e], start[e + 1]).
struct ExpertRows {
  std::vector<int32_t> start, out_row, x_row;

  // `per_token`: rows of the result that read the same row of x.
  ExpertRows(const int32_t* ids, int64_t count, int64_t experts, int64_t per_token)
      : start(experts + 1), out_row(count), x_row(count) {
    for (int64_t i = 0; i < count; ++i) ++start[ids[i] + 1];
    std::partial_sum(start.begin(), start.end(), start.begin());
    std::vector<int32_t> next(start.begin(), start.end() - 1);
    for (int64_t i = 0; i < count; ++i) {
      const int32_t place = next[ids[i]]++;
      out_row[place] = static_cast<int32_t>(i);
      x_row[place] = static_cast<int32_t>(i / per_token);
    }
  }
};

}  // namespace kvforge
