// int4 weights with steps by tiles (cpu_tiles.h): a code less 8, times its group's steps, is a signed byte. So a block of
// a panel is unpacked to bytes, once for all rows of a piece, and multiplied as int8 weights are, with rows of signed
// bytes. Sums are the integers of cpu_int4.cpp, and rows are normed without contraction as there.
// Compiled into namespace KVFORGE_ISA, so no inline function with external linkage may be used here.
#include "packed_linear/cpu_int4.h"
#include "packed_linear/cpu_tiles.h"

namespace kvforge {
namespace {

constexpr int64_t kBlockGroups = 16;  // that are unpacked at once
constexpr int64_t kWordsOfGroup = kInt4GroupDepth / 4, kOutputs = 16;

struct alignas(64) Block {
  char groups[kBlockGroups][kWordsOfGroup][kPanelRow];
};

struct SignedBytes {
  template <int C, int A, int B>
  static void dot() { tile_dot_s8s8<C, A, B>(); }
};

// Also fetches as many of the weights that come next, where there are any.
void unpack(const char* weight, int64_t groups, const char* next, Block& block) {
  const __m512i low_halves = _mm512_set1_epi8(0x0f);
  for (int64_t g = 0; g < groups; ++g, weight += kInt4GroupBytes) {
    if (next != nullptr)
      for (int64_t line = 0; line < kInt4GroupBytes; line += kLine)
        __builtin_prefetch(next + g * kInt4GroupBytes + line, 0, 2);
    for (int64_t j = 0; j < kPanel; j += kOutputs) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(weight + kScalesOffset + j));
      const __m512i steps = _mm512_cvtepi8_epi32(bytes), magnitude = _mm512_abs_epi32(steps);
      // A code times a magnitude, at most 15 each, fits into its byte, so one multiplication serves two of them.
      const __m512i factor = _mm512_or_si512(magnitude, _mm512_slli_epi32(magnitude, 16));
      const __m512i middle = _mm512_mullo_epi32(magnitude, _mm512_set1_epi32(kMiddle * 0x01010101));
      const __m512i sign = _mm512_srai_epi32(steps, 31);
      const auto to_bytes = [&](__m512i codes) __attribute__((always_inline)) {
        const __m512i difference = _mm512_sub_epi8(_mm512_mullo_epi16(codes, factor), middle);
        return _mm512_sub_epi8(_mm512_xor_si512(difference, sign), sign);
      };
      for (int64_t c = 0; c < kChunks; ++c) {
        const __m512i codes = _mm512_loadu_si512(weight + c * kChunkBytes + j * 4);
        const __m512i low = _mm512_and_si512(codes, low_halves);
        const __m512i high = _mm512_and_si512(_mm512_srli_epi32(codes, 4), low_halves);
        _mm512_store_si512(block.groups[g][2 * c] + j * 4, to_bytes(low));
        _mm512_store_si512(block.groups[g][2 * c + 1] + j * 4, to_bytes(high));
      }
    }
  }
}

void multiply_unpacked(const LinearTile& t) {
  Block block;
  LinearTile part = t;
  part.weight = block.groups[0][0];
  part.next = nullptr;
  for (int64_t first = 0; first < t.groups; first += kBlockGroups) {
    const int64_t groups = t.groups - first < kBlockGroups ? t.groups - first : kBlockGroups;
    const int64_t begin = first * kInt4GroupBytes;
    unpack(t.weight + begin, groups, t.next == nullptr ? nullptr : t.next + begin, block);
    part.rows = t.rows + first * kInt4GroupDepth * kRowsOfTile;
    part.groups = groups * kWordsOfGroup;
    part.add = t.add || first > 0;
    multiply<SignedBytes>(part);
  }
}

}  // namespace

namespace KVFORGE_ISA {
extern const LinearKernel linear_int4_kernel = {
    .band_rows = kRowsOfTile,
    .row_group_bytes = kInt4GroupDepth,
    .panel_group_bytes = kInt4GroupBytes,
    .depth_block = 2 * kBlockGroups,  // so that no block is without groups
    .row_block = 256,
    .piece_bytes = 1 << 20,
    .enter = configure_tiles,
    .leave = release_tiles,
    .takes_x = takes_x,
    .band_bytes = quantized_band_bytes,
    .prepare = prepare_quantized<0x80>,  // shifted by 128 to signed bytes
    .multiply = multiply_unpacked,
    .dequantize = dequantize_bands,
    .finish = isa_avx512_vnni::finish_linear,
};
}

}  // namespace kvforge
