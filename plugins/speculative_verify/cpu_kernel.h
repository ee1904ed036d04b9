// What the operator hands to the kernel that verifies a sequence; it is compiled once per instruction set.
#pragma once

#include <cstdint>

namespace kvforge {

struct DraftVerify {
  const float* logits;  // [D + S, vocab], rows of `logits_stride` floats
  int64_t logits_stride;
  const int32_t* draft_ids;    // [D], checked against vocab
  const int32_t* draft_start;  // [S + 1], checked
  const float* draft_probs;    // [D, vocab], rows of `probs_stride` floats, or null: one-hot
  int64_t probs_stride;
  const float* temperature;  // [S]
  const float* uniform;      // [D + S, 2], contiguous
  int32_t* accepted;         // [S]
  int32_t* next_token;       // [S]
  int64_t vocab;             // at least 1
};

namespace isa_portable { void verify_sequence(const DraftVerify& args, int64_t sequence); }
#if defined(__x86_64__)
namespace isa_avx2 { void verify_sequence(const DraftVerify& args, int64_t sequence); }
namespace isa_avx512 { void verify_sequence(const DraftVerify& args, int64_t sequence); }
#endif

}  // namespace kvforge
