// Which of the compiled variants of a kernel this CPU runs.
#pragma once

namespace kvforge {

// Each has the instructions of those before it. avx512: F, BW, VL and DQ; avx512_vnni: and VNNI; avx512_bf16: and BF16
// and VBMI.
enum class Isa { portable, avx2, avx512, avx512_vnni, avx512_bf16 };

// Matrix products by AMX's tiles, beside Isa::avx512_bf16 for all the rest: the CPU's, or arrays in their place, which serve
// to test the same source elsewhere.
enum class Tiles { none, software, amx };

// The best variant that this CPU and the library have, or the one that the environment variable KVFORGE_CPU_ISA names: a
// name of Isa, "amx_software" or "amx". Throws c10::Error when that one is unknown, was not compiled or is not available
// here. Code may name variants that were not compiled: see _absent in plugins/build.py.
Isa current_isa();
Tiles current_tiles();

}  // namespace kvforge
