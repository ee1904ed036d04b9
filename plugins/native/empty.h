// Tensors whose contents are still to be written.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>

namespace kvforge {

// A contiguous tensor on the CPU. at::empty does the same by way of the dispatcher; its header takes some four seconds
// to compile.
inline at::Tensor empty_tensor(at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::Tensor(at::detail::empty_cpu(sizes, dtype));
}

}  // namespace kvforge
