// AMX's tiles: eight registers of 16 rows of 64 bytes. With KVFORGE_SOFTWARE_TILES they are arrays, and every sum is
// made in the same order. For files that are compiled for one instruction set: everything here has internal linkage.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace kvforge {
namespace {

constexpr int64_t kTileBytes = 1024, kTileRowBytes = 64, kRowsOfTile = 16;

#if defined(KVFORGE_SOFTWARE_TILES)

struct alignas(64) TileArrays {
  char bytes[8][kTileBytes];
};
thread_local TileArrays tiles;

inline void configure_tiles() {}
inline void release_tiles() {}

template <int T>
inline void tile_zero() {
  std::memset(tiles.bytes[T], 0, kTileBytes);
}

template <int T>
inline void tile_load(const void* p, int64_t stride) {
  for (int64_t r = 0; r < kRowsOfTile; ++r)
    std::memcpy(tiles.bytes[T] + r * kTileRowBytes, static_cast<const char*>(p) + r * stride, kTileRowBytes);
}

template <int T>
inline void tile_load_once(const void* p, int64_t stride) { tile_load<T>(p, stride); }

template <int T>
inline void tile_store(void* p, int64_t stride) {
  for (int64_t r = 0; r < kRowsOfTile; ++r)
    std::memcpy(static_cast<char*>(p) + r * stride, tiles.bytes[T] + r * kTileRowBytes, kTileRowBytes);
}

inline float flush_denormal(float x) { return __builtin_fabsf(x) < 0x1p-126f ? __builtin_copysignf(0.0f, x) : x; }

inline float bf16_at(const char* p) {
  uint16_t half;
  std::memcpy(&half, p, sizeof half);
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return flush_denormal(value);
}

// C += A B of bfloat16 pairs. The even and the odd products of the 32 are summed apart, from zero, and then added; numbers
// below the normal ones are zeros (Intel's manual, TDPBF16PS).
template <int C, int A, int B>
inline void tile_dot_bf16() {
  for (int64_t m = 0; m < kRowsOfTile; ++m)
    for (int64_t n = 0; n < kTileRowBytes / 4; ++n) {
      float sums[2] = {};
      for (int64_t k = 0; k < kRowsOfTile; ++k)
        for (int64_t i = 0; i < 2; ++i) {
          const float a = bf16_at(tiles.bytes[A] + m * kTileRowBytes + k * 4 + i * 2);
          const float b = bf16_at(tiles.bytes[B] + k * kTileRowBytes + n * 4 + i * 2);
          sums[i] = flush_denormal(__builtin_fmaf(a, b, sums[i]));
        }
      char* const place = tiles.bytes[C] + m * kTileRowBytes + n * 4;
      float c;
      std::memcpy(&c, place, sizeof c);
      c = flush_denormal(flush_denormal(c) + flush_denormal(sums[0] + sums[1]));
      std::memcpy(place, &c, sizeof c);
    }
}

// C += A B of bytes, those of B signed, in int32.
template <int C, int A, int B, typename ByteOfA>
inline void tile_dot_bytes() {
  for (int64_t m = 0; m < kRowsOfTile; ++m)
    for (int64_t n = 0; n < kTileRowBytes / 4; ++n) {
      char* const place = tiles.bytes[C] + m * kTileRowBytes + n * 4;
      int32_t c;
      std::memcpy(&c, place, sizeof c);
      for (int64_t k = 0; k < kTileRowBytes; ++k) {
        const int32_t a = static_cast<ByteOfA>(tiles.bytes[A][m * kTileRowBytes + k]);
        c += a * static_cast<int8_t>(tiles.bytes[B][k / 4 * kTileRowBytes + n * 4 + k % 4]);
      }
      std::memcpy(place, &c, sizeof c);
    }
}

template <int C, int A, int B>
inline void tile_dot_u8s8() { tile_dot_bytes<C, A, B, uint8_t>(); }

template <int C, int A, int B>
inline void tile_dot_s8s8() { tile_dot_bytes<C, A, B, int8_t>(); }

#else

// Of the calling thread, which must release them before it is parked: a thread that holds tiles is dearer to switch.
inline void configure_tiles() {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {kTileRowBytes, kTileRowBytes, kTileRowBytes, kTileRowBytes,
                              kTileRowBytes, kTileRowBytes, kTileRowBytes, kTileRowBytes};
    uint8_t rows[16] = {kRowsOfTile, kRowsOfTile, kRowsOfTile, kRowsOfTile,
                        kRowsOfTile, kRowsOfTile, kRowsOfTile, kRowsOfTile};
  } config;
  asm volatile("ldtilecfg %0" ::"m"(config));
}

inline void release_tiles() { asm volatile("tilerelease"); }

template <int T>
inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}

template <int T>
inline void tile_load(const void* p, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(T) : "memory");
}

// The same of what is not read again soon: it takes no place in the first-level cache.
template <int T>
inline void tile_load_once(const void* p, int64_t stride) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(T) : "memory");
}

template <int T>
inline void tile_store(void* p, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(T) : "memory");
}

// C += A B of bfloat16 pairs.
template <int C, int A, int B>
inline void tile_dot_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

// C += A B of unsigned and signed bytes, in int32.
template <int C, int A, int B>
inline void tile_dot_u8s8() {
  asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

// C += A B of signed bytes, in int32.
template <int C, int A, int B>
inline void tile_dot_s8s8() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

#endif

struct Bf16 {
  template <int C, int A, int B>
  static void dot() { tile_dot_bf16<C, A, B>(); }
};

// Sums of two tiles of rows by two of columns, in tiles 0 to 3. They are stored while the next ones are computed: a store
// that waits for its product holds up the products behind it.
class FourSums {
 public:
  // Bytes from row to row of the sums, from one tile of columns to the other, and from the upper rows to the lower ones.
  FourSums(int64_t row, int64_t beside, int64_t below) : row_(row), beside_(beside), below_(below) {}

  // left(tile, step) loads tile 4 with upper rows and 5 with lower ones, right(tile, step) 6 with the first columns and 7
  // with the second ones; begin(tile, place) is what is added to, after() is called with every step.
  template <typename Dot, typename Left, typename Right, typename Begin, typename After>
  inline __attribute__((always_inline)) void multiply(char* sums, int64_t steps, const Left& left, const Right& right,
                                                      const Begin& begin, const After& after) {
    const auto start = [&](auto tile) __attribute__((always_inline)) {
      if (late_ != nullptr) store<tile.value>();
      begin(tile, sums + offset(tile.value));
    };
    const auto step = [&](int64_t s, bool first) __attribute__((always_inline)) {
      left(std::integral_constant<int, 4>(), s);
      right(std::integral_constant<int, 6>(), s);
      if (first) start(std::integral_constant<int, 0>());
      Dot::template dot<0, 4, 6>();
      right(std::integral_constant<int, 7>(), s);
      if (first) start(std::integral_constant<int, 1>());
      Dot::template dot<1, 4, 7>();
      left(std::integral_constant<int, 5>(), s);
      if (first) start(std::integral_constant<int, 2>());
      Dot::template dot<2, 5, 6>();
      if (first) start(std::integral_constant<int, 3>());
      Dot::template dot<3, 5, 7>();
      after();
    };
    step(0, true);
    for (int64_t s = 1; s < steps; ++s) step(s, false);
    late_ = sums;
  }

  // Stores what is not yet.
  void finish() {
    if (late_ == nullptr) return;
    store<0>();
    store<1>();
    store<2>();
    store<3>();
    late_ = nullptr;
  }

 private:
  int64_t offset(int tile) const { return tile % 2 * beside_ + tile / 2 * below_; }

  template <int T>
  void store() { tile_store<T>(late_ + offset(T), row_); }

  const int64_t row_, beside_, below_;
  char* late_ = nullptr;
};

}  // namespace
}  // namespace kvforge
