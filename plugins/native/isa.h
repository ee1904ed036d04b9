// Which of the compiled variants of a kernel this CPU runs.
#pragma once

namespace kvforge {

enum class Isa { portable, avx2, avx512 };  // avx512 = F, BW, VL, DQ, BF16, VNNI and VBMI

// The best variant this CPU has, or the one that the environment variable KVFORGE_CPU_ISA names
// ("portable", "avx2", "avx512"); throws c10::Error when that one is unknown or not available here.
Isa current_isa();

}  // namespace kvforge
