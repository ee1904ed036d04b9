// The products of all experts with packed weights, in one parallel loop.
#pragma once

#include "expert_linear/cpu_rows.h"
#include "packed_linear/cpu_weights.h"

namespace kvforge {

// `all` is what every expert has in common: x, its stride, depth, outputs, panels, out, and the first expert's weights
// and scales, which lie weight_bytes and num_scales apart.
void multiply_experts(const LinearArgs& all, Weights weights, int64_t weight_bytes, int64_t num_scales,
                      const ExpertRows& rows);

}  // namespace kvforge
