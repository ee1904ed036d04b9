// bf16 and int8 weights by tiles (cpu_tiles.h).
// Compiled into namespace KVFORGE_ISA, so no inline function with external linkage may be used here.
#include "packed_linear/cpu_tiles.h"

namespace kvforge {
namespace {

struct Int8 {
  template <int C, int A, int B>
  static void dot() { tile_dot_u8s8<C, A, B>(); }
};

int64_t bf16_band_bytes(const LinearArgs& a) { return num_steps(a, 2) * kTileBytes; }

// A row normed as rms_norm() does, straight into its places: depth is a multiple of 32.
void norm_into_tiles(const LinearArgs& a, const bf16* x, int64_t steps, char* place) {
  __m512 squares[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  const auto low = [](__m512i pair) { return reinterpret_cast<__m512>(_mm512_slli_epi32(pair, 16)); };
  const auto high = [](__m512i pair) {
    return reinterpret_cast<__m512>(_mm512_and_si512(pair, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
  };
  for (int64_t s = 0; s < steps; ++s) {
    const __m512i bits = _mm512_loadu_si512(x + s * 32);
    squares[0] = _mm512_fmadd_ps(low(bits), low(bits), squares[0]);
    squares[1] = _mm512_fmadd_ps(high(bits), high(bits), squares[1]);
  }
  const float mean = _mm512_reduce_add_ps(_mm512_add_ps(squares[0], squares[1])) / static_cast<float>(a.depth);
  const __m512 scale = _mm512_set1_ps(1.0f / __builtin_sqrtf(mean + a.eps));
  // Rounds the low and the high halves of pairs to bfloat16 and puts them together again.
  const auto round = [](__m512 low, __m512 high) {
    const auto bits = [](__m512 v) {
      return _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v)));
    };
    return _mm512_or_si512(bits(low), _mm512_slli_epi32(bits(high), 16));
  };
  for (int64_t s = 0; s < steps; ++s, place += kTileBytes) {
    const __m512i bits = _mm512_loadu_si512(x + s * 32), weight = _mm512_loadu_si512(a.norm + s * 32);
    const __m512i unit = round(_mm512_mul_ps(low(bits), scale), _mm512_mul_ps(high(bits), scale));
    _mm512_storeu_si512(place, round(_mm512_mul_ps(low(unit), low(weight)), _mm512_mul_ps(high(unit), high(weight))));
  }
}

void prepare_bf16(const LinearArgs& a, int64_t begin, int64_t end, char* bands, char* scratch) {
  const int64_t steps = num_steps(a, 2);
  bf16* normed = reinterpret_cast<bf16*>(scratch);
  in_bands(a, begin, end, steps, bf16_band_bytes(a), bands, [&](const bf16* x, char* place) {
    if (a.norm != nullptr && a.depth % 32 == 0) return norm_into_tiles(a, x, steps, place);
    if (a.norm != nullptr) rms_norm(x, a.norm, a.depth, a.eps, normed);
    spread(reinterpret_cast<const char*>(a.norm != nullptr ? normed : x), a.depth * 2, steps, place);
  });
}

}  // namespace

namespace KVFORGE_ISA {

extern const LinearKernel linear_bf16_kernel = {
    .band_rows = kRowsOfTile,
    .depth_block = 128,
    .row_block = 256,
    .piece_bytes = 1 << 20,
    .enter = configure_tiles,
    .leave = release_tiles,
    .takes_x = takes_x,
    .band_bytes = bf16_band_bytes,
    .prepare = prepare_bf16,
    .multiply = multiply<Bf16>,
    .finish = isa_avx512_bf16::finish_linear,
};
extern const LinearKernel linear_int8_kernel = {
    .band_rows = kRowsOfTile,
    .depth_block = 128,
    .row_block = 256,
    .piece_bytes = 1 << 20,
    .enter = configure_tiles,
    .leave = release_tiles,
    .takes_x = takes_x,
    .band_bytes = quantized_band_bytes,
    .prepare = prepare_quantized<0>,
    .multiply = multiply<Int8>,
    .dequantize = dequantize_bands,
    .finish = isa_avx512_vnni::finish_linear,
};

}  // namespace KVFORGE_ISA
}  // namespace kvforge
