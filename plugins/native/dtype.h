// What the elements of a tensor are, for kernels that know nothing of ATen.
#pragma once

#include <cstdint>

namespace kvforge {

// fp8 = e4m3 without infinities; int4: two numbers in a byte, of heads that are rotated (native/hadamard.h).
enum class Dtype : uint8_t { float32, bfloat16, fp8, int8, int4 };

}  // namespace kvforge
