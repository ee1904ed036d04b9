// Registers the CPU implementations; schemas are declared in Python (plugins/registration.py). The only file
// that includes torch/library.h, which takes longer to compile than the rest of a file.
#include <torch/library.h>

#include "native/operators.h"

TORCH_LIBRARY_IMPL(kvforge, CPU, m) {
  m.impl("rope_paged_kv_write", &kvforge::rope_paged_kv_write);
  m.impl("paged_attention", &kvforge::paged_attention);
  m.impl("low_rank_key_reconstruct", &kvforge::low_rank_key_reconstruct);
  m.impl("speculative_verify", &kvforge::speculative_verify);
  m.impl("packed_linear", &kvforge::packed_linear);
  m.impl("landmark_select", &kvforge::landmark_select);
  m.impl("chunk_cache_update", &kvforge::chunk_cache_update);
  m.impl("selected_kv_write", &kvforge::selected_kv_write);
}
