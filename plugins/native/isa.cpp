#include "native/isa.h"

#include <c10/util/Exception.h>

#include <cstdlib>
#include <string>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace kvforge {
namespace {

struct Variant {
  const char* name;
  Isa isa;
  Tiles tiles;
};

constexpr Variant kVariants[] = {
    {"portable", Isa::portable, Tiles::none},
    {"avx2", Isa::avx2, Tiles::none},
    {"avx512", Isa::avx512, Tiles::none},
    {"avx512_vnni", Isa::avx512_vnni, Tiles::none},
    {"avx512_bf16", Isa::avx512_bf16, Tiles::none},
    {"amx_software", Isa::avx512_bf16, Tiles::software},
    {"amx", Isa::avx512_bf16, Tiles::amx},
};

Isa detect() {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return Isa::portable;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (!avx512) return Isa::avx2;
  if (!__builtin_cpu_supports("avx512vnni")) return Isa::avx512;
  const bool bf16 = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
  return bf16 ? Isa::avx512_bf16 : Isa::avx512_vnni;
#else
  return Isa::portable;
#endif
}

// Whether the CPU has AMX for bfloat16 and int8, and float16 beside it as all of them do, and the kernel lets this process use it, which it has to be asked once.
bool detect_amx() {
#if defined(__x86_64__) && defined(__linux__)
  constexpr unsigned kBf16 = 1u << 22, kFloat16 = 1u << 23, kTile = 1u << 24, kInt8 = 1u << 25;  // of CPUID leaf 7, EDX
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  if ((~d & (kBf16 | kFloat16 | kTile | kInt8)) != 0) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

// Whether the library has the kernels of a variant: its name is in the list that it was compiled with.
bool is_compiled(const Variant& variant) {
  const std::string names = "," KVFORGE_COMPILED_ISAS ",";
  return names.find("," + std::string(variant.name) + ",") != std::string::npos;
}

// The last of the variants that this CPU and the library have, software tiles apart.
const Variant& best(Isa isa, bool amx) {
  const Variant* result = kVariants;
  for (const Variant& variant : kVariants)
    if (variant.isa <= isa && variant.tiles != Tiles::software && (variant.tiles != Tiles::amx || amx) &&
        is_compiled(variant))
      result = &variant;
  return *result;
}

const Variant& current() {
  static const Isa isa = detect();
  static const bool amx = isa == Isa::avx512_bf16 && detect_amx();
  static const Variant& chosen = best(isa, amx);
  const char* forced = std::getenv("KVFORGE_CPU_ISA");
  if (forced == nullptr || *forced == '\0') return chosen;
  const std::string name(forced);
  std::string names;
  for (const Variant& variant : kVariants) {
    names += std::string(names.empty() ? "" : ", ") + variant.name;
    if (name != variant.name) continue;
    TORCH_CHECK(
        variant.isa <= isa && (variant.tiles != Tiles::amx || amx), "KVFORGE_CPU_ISA=", name,
        " asks for instructions that this CPU does not have");
    TORCH_CHECK(
        is_compiled(variant), "KVFORGE_CPU_ISA=", name, " asks for kernels that this library lacks; it has those for "
        KVFORGE_COMPILED_ISAS);
    return variant;
  }
  TORCH_CHECK(false, "KVFORGE_CPU_ISA must be one of ", names, ", not '", name, "'");
}

}  // namespace

Isa current_isa() { return current().isa; }

Tiles current_tiles() { return current().tiles; }

}  // namespace kvforge
