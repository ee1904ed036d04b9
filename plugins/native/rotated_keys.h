// The check of an argument of the operators that read and write int4: keys of int8 that are rotated as int4's are.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <optional>

namespace kvforge {

inline void check_rotated(const char* op, bool rotates_keys, const at::Tensor& k_pool,
                          const std::optional<at::Tensor>& k_scales) {
  TORCH_CHECK(
      !rotates_keys || (k_pool.scalar_type() == at::kChar && k_scales.has_value()), op,
      ": rotates_keys is for a k_pool of int8 with k_scales, not ", k_pool.scalar_type());
}

}  // namespace kvforge
