// A parallel loop whose threads take the next index when they are done with the last one.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>

namespace kvforge {

// Calls body(i) for i in [0, count), started in this order, on at most max_threads threads.
template <typename Body>
void dynamic_for(int64_t count, int64_t max_threads, const Body& body) {
  std::atomic<int64_t> next{0};
  const int64_t threads = std::min({count, std::max<int64_t>(max_threads, 1), int64_t{at::get_num_threads()}});
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (int64_t i = next++; i < count; i = next++) body(i);
  });
}

}  // namespace kvforge
