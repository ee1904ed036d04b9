#include "native/isa.h"

#include <c10/util/Exception.h>

#include <cstdlib>
#include <string>

namespace kvforge {
namespace {

Isa detect() {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return Isa::portable;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") &&
      __builtin_cpu_supports("avx512vbmi");
  return avx512 ? Isa::avx512 : Isa::avx2;
#else
  return Isa::portable;
#endif
}

}  // namespace

Isa current_isa() {
  static const Isa best = detect();
  const char* forced = std::getenv("KVFORGE_CPU_ISA");
  if (forced == nullptr || *forced == '\0') return best;
  const std::string name(forced);
  TORCH_CHECK(
      name == "portable" || name == "avx2" || name == "avx512",
      "KVFORGE_CPU_ISA must be portable, avx2 or avx512, not '", name, "'");
  const Isa isa = name == "portable" ? Isa::portable : name == "avx2" ? Isa::avx2 : Isa::avx512;
  TORCH_CHECK(isa <= best, "KVFORGE_CPU_ISA=", name, " asks for instructions that this CPU does not have");
  return isa;
}

}  // namespace kvforge
