"""Compiles a kernel to PTX for a GPU that need not be there, in the form in which TensorRT starts it."""

import re
from dataclasses import dataclass
from typing import Any

from plugins.errors import PluginError
from plugins.triton_cache import check_capability
from plugins.triton_kernel import KernelSpec, Pointer

CAPABILITIES = {80: 163, 89: 99, 90: 227, 100: 227}
"""Compute capability (major * 10 + minor) -> KiB of shared memory that one block can have."""

_NUM_SCRATCH = 2  # Triton appends two pointers to scratch memory, which only its own launcher passes.
_ENTRY = re.compile(r"\.visible\s+\.entry\s+(\w+)\(\n(.*?)\n\)", re.DOTALL)
_PARAMETER = re.compile(r"\.param\s+\.(\w+)")
_REQNTID = re.compile(r"\.reqntid\s+(\d+)")


@dataclass(frozen=True)
class CompiledKernel:
    """PTX of one kernel.

    `parameters`: PTX types in TensorRT's order, "u64" for a tensor and "u32" for a size. `shared_bytes`: dynamic
    shared memory of a block; `num_threads`: threads of a block, along x.
    """

    entry: str
    ptx: str
    parameters: tuple[str, ...]
    shared_bytes: int
    num_warps: int
    num_threads: int
    capability: int


def compile_ptx(spec: KernelSpec, capability: int, ptx_version: int = 86) -> CompiledKernel:
    """Compile `spec` for a compute capability (90: 9.0) to PTX of ISA `ptx_version` (86: 8.6, CUDA 12.7 and later).

    The PTX carries no paths and no line numbers. From capability 90 on the code is for that architecture alone
    ("sm_90a"). Raises PluginError for a capability that is not in CAPABILITIES, for an FP8 cache below 8.9, when
    Triton interprets kernels, and when the kernel needs what TensorRT does not give it: scratch memory, or more
    shared memory than the GPU has.
    """
    if capability not in CAPABILITIES:
        known = ", ".join(map(str, CAPABILITIES))
        raise PluginError(f"Kernels are compiled for the compute capabilities {known}, not {capability}.")
    for argument in spec.arguments:
        if isinstance(argument, Pointer):
            check_capability(argument.dtype, capability)
    kernel = _compile(spec, capability, ptx_version)
    metadata = kernel.metadata
    scratch = metadata.global_scratch_size + metadata.profile_scratch_size
    if scratch:
        raise PluginError(f"{spec.name} needs {scratch} bytes of scratch memory, which TensorRT does not pass.")
    if metadata.shared > CAPABILITIES[capability] * 1024:
        raise PluginError(
            f"{spec.name} needs {metadata.shared} bytes of shared memory and a GPU of capability {capability} has "
            f"{CAPABILITIES[capability]} KiB; use smaller blocks."
        )
    return _without_scratch(spec, kernel.asm["ptx"], metadata, capability)


def _compile(spec: KernelSpec, capability: int, ptx_version: int) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction

    if not isinstance(spec.function, JITFunction):
        raise PluginError("Kernels cannot be compiled while Triton interprets them; unset TRITON_INTERPRET.")
    constants = dict(spec.constants)
    types = {argument.name: argument.type for argument in spec.arguments}
    source = ASTSource(
        fn=spec.function,
        signature={name: types.get(name, "constexpr") for name in spec.function.arg_names},
        constexprs=constants,
        attrs={
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(spec.function.arg_names)
            if types.get(name, "").startswith("*")
        },
    )
    options = {"num_warps": spec.num_warps, "num_stages": spec.num_stages, "ptx_version": ptx_version}
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.disable_line_info = True
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def _without_scratch(spec: KernelSpec, ptx: str, metadata: Any, capability: int) -> CompiledKernel:
    match = _ENTRY.search(ptx)
    if match is None:
        raise PluginError(f"{spec.name}: Triton's PTX has no entry point; use a Triton release that is supported.")
    lines = [line.strip().rstrip(",") for line in match[2].split("\n") if line.strip()]
    kept, scratch = lines[:-_NUM_SCRATCH], lines[-_NUM_SCRATCH:]
    names = [line.split()[-1] for line in scratch]
    types = [_type(line) for line in lines]
    expected = ["u64" if isinstance(argument, Pointer) else "u32" for argument in spec.arguments]
    body = ptx[match.end() :]
    if types != [*expected, "u64", "u64"] or any(re.search(rf"\b{name}\b", body) for name in names):
        raise PluginError(
            f"{spec.name}: the compiled kernel takes ({', '.join(types)}), not what it declares plus scratch."
        )
    header = f".visible .entry {match[1]}(\n" + ",\n".join("\t" + line for line in kept) + "\n)"
    threads = _REQNTID.search(body)
    if threads is None or int(threads[1]) != metadata.num_warps * 32:
        raise PluginError(f"{spec.name}: the compiled kernel's block is not {metadata.num_warps} warps.")
    return CompiledKernel(
        entry=match[1],
        ptx=ptx[: match.start()] + header + body,
        parameters=tuple(expected),
        shared_bytes=metadata.shared,
        num_warps=metadata.num_warps,
        num_threads=int(threads[1]),
        capability=capability,
    )


def _type(parameter: str) -> str:
    match = _PARAMETER.search(parameter)
    return match[1] if match else parameter
