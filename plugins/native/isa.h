// Which of the compiled variants of a kernel this CPU runs.
#pragma once

namespace kvforge {

enum class Isa { portable, avx2, avx512 };  // avx512 = F, BW, VL, DQ, BF16, VNNI and VBMI

// Matrix products by AMX's tiles, beside Isa::avx512 for all the rest: the CPU's, or arrays in their place, which serve
// to test the same source elsewhere.
enum class Tiles { none, software, amx };

// The best variant this CPU has, or the one that the environment variable KVFORGE_CPU_ISA names ("portable", "avx2",
// "avx512", "amx_software", "amx"); throws c10::Error when that one is unknown or not available here.
Isa current_isa();
Tiles current_tiles();

}  // namespace kvforge
