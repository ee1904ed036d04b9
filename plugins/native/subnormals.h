// Numbers below 2^-126, which take a hundred times as long as others on CPUs of x86.
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace kvforge {

// While it lives, they are zeros to this thread, as operands and as results. Other CPUs are not slower and keep them.
class FlushSubnormals {
 public:
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;
#if defined(__x86_64__)
  FlushSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~FlushSubnormals() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#else
  FlushSubnormals() {}
#endif
};

}  // namespace kvforge
