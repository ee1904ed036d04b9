// What operators on states of sequences have in common: checks of their rows.
#pragma once

#include "native/checks.h"

namespace kvforge {

// The rows of a pool that sequences go on from or that tokens write, [count] int32, negative for none.
inline at::Tensor rows_tensor(const char* op, const char* name, const at::Tensor& t, int64_t count, int64_t rows) {
  const at::Tensor found = int32_tensor(op, name, t, {count});
  const int32_t* row = found.const_data_ptr<int32_t>();
  for (int64_t i = 0; i < count; ++i)
    TORCH_CHECK(row[i] < rows, op, ": ", name, " holds row ", row[i], " but the pool has ", rows);
  return found;
}

}  // namespace kvforge
