// A parallel loop in which each thread has a range of its own and helps the others when it is done with it.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <memory>

namespace kvforge {

// Each of at most max_threads threads calls start() for a body, and the bodies are called as body(i, next) for every
// i in [0, count); next is the index that the thread expects after i, or -1. A thread takes its own range in order.
template <typename Start>
void ranged_for(int64_t count, int64_t max_threads, const Start& start) {
  struct alignas(64) Range {
    std::atomic<int64_t> next;
    int64_t end;
  };
  const int64_t threads = std::min({count, std::max<int64_t>(max_threads, 1), int64_t{at::get_num_threads()}});
  if (threads <= 0) return;
  const std::unique_ptr<Range[]> ranges(new Range[threads]);
  for (int64_t t = 0; t < threads; ++t) {
    ranges[t].next = count * t / threads;
    ranges[t].end = count * (t + 1) / threads;
  }
  at::parallel_for(0, threads, 1, [&](int64_t first, int64_t) {
    auto body = start();
    for (int64_t t = first; t < first + threads; ++t) {
      Range& range = ranges[t % threads];
      for (int64_t i = range.next++; i < range.end; i = range.next++) body(i, i + 1 < range.end ? i + 1 : -1);
    }
  });
}

}  // namespace kvforge
