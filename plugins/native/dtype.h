// What the elements of a tensor are, for kernels that know nothing of ATen.
#pragma once

#include <cstdint>

namespace kvforge {

enum class Dtype : uint8_t { float32, bfloat16, fp8, int8 };  // fp8 = e4m3 without infinities

}  // namespace kvforge
