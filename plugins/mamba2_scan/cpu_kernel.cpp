// The recurrence of a block of a state's columns, which do not depend on each other. Compiled once per instruction set
// into namespace KVFORGE_ISA, so no inline function with external linkage may be used here: the linker would keep one
// variant of it.
#include "mamba2_scan/cpu_kernel.h"

#include "native/multiply_add.h"
#include "native/rows.h"

namespace kvforge {
namespace {

constexpr int64_t kVectors = kScanColumns / kLanes;

// Brings a state [state_dim, kScanColumns] up to date by the outer product of b and added, and with queries gives its
// product with c: sums of even and of odd rows, then of both.
template <bool has_queries>
void pass(
    float* state, int64_t state_dim, float decay, const float* b, const float* c, const float* added, vfloat* found) {
  vfloat sums[2][kVectors] = {}, column[kVectors];
  for (int64_t v = 0; v < kVectors; ++v) column[v] = load(added + v * kLanes);
  const auto step = [&](int64_t i, int parity) {
    for (int64_t v = 0; v < kVectors; ++v) {
      float* place = state + i * kScanColumns + v * kLanes;
      const vfloat s = multiply_add(broadcast(b[i]), column[v], load(place) * decay);
      store(place, s);
      if constexpr (has_queries) sums[parity][v] = multiply_add(broadcast(c[i]), s, sums[parity][v]);
    }
  };
  int64_t i = 0;
  for (; i + 2 <= state_dim; i += 2) {
    step(i, 0);
    step(i + 1, 1);
  }
  if (i < state_dim) step(i, 0);
  for (int64_t v = 0; v < kVectors; ++v) found[v] = sums[0][v] + sums[1][v];
}

template <typename Element, bool has_queries>
void run(const Mamba2Scan& a, int64_t sequence, int64_t head, int64_t first, float* scratch) {
  const int64_t n = a.state_dim, p = a.head_dim, count = p - first < kScanColumns ? p - first : kScanColumns;
  const int64_t group = head / (a.heads / a.groups), inner = a.heads * p;
  const int64_t begin = a.query_start[sequence], end = a.query_start[sequence + 1];
  float *state = scratch, *x = state + n * kScanColumns, *added = x + kScanColumns, *b = added + kScanColumns, *c = b + n;
  for (int64_t i = 0; i < scan_scratch(n); ++i) scratch[i] = 0.0f;
  const auto row = [&](int64_t index) { return a.pool + (index * a.heads + head) * n * p + first; };
  if (begin < end && a.state_read[sequence] >= 0)
    copy_rows(row(a.state_read[sequence]), p, state, kScanColumns, n, count);
  for (int64_t t = begin; t < end; ++t) {
    const Element* token = static_cast<const Element*>(a.xbc) + t * a.token_stride;
    widen(token + head * p + first, x, count);
    widen(token + inner + group * n, b, n);
    if constexpr (has_queries) widen(token + inner + (a.groups + group) * n, c, n);
    const float step = a.step[t * a.heads + head];
    for (int64_t v = 0; v < kVectors; ++v) store(added + v * kLanes, load(x + v * kLanes) * step);
    vfloat found[kVectors];
    pass<has_queries>(state, n, a.decay[t * a.heads + head], b, c, added, found);
    if constexpr (has_queries) {
      for (int64_t v = 0; v < kVectors; ++v)
        store(x + v * kLanes, multiply_add(broadcast(a.skip[head]), load(x + v * kLanes), found[v]));
      narrow(x, static_cast<Element*>(a.out) + (t * a.heads + head) * p + first, count);
    }
    if (a.state_write[t] >= 0) copy_rows(state, kScanColumns, row(a.state_write[t]), p, n, count);
  }
}

}  // namespace

namespace KVFORGE_ISA {

void scan(const Mamba2Scan& args, int64_t sequence, int64_t head, int64_t first, float* scratch) {
  if (args.has_queries)
    args.is_bf16 ? run<bf16, true>(args, sequence, head, first, scratch)
                 : run<float, true>(args, sequence, head, first, scratch);
  else
    args.is_bf16 ? run<bf16, false>(args, sequence, head, first, scratch)
                 : run<float, false>(args, sequence, head, first, scratch);
}

}  // namespace KVFORGE_ISA
}  // namespace kvforge
