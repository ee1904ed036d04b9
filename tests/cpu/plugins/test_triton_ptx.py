"""PTX of the Triton kernels, compiled without a GPU, and what TensorRT is told of it."""

import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

import plugins
from plugins.chunk_cache_update import cuda as chunk_cache_update
from plugins.registry import modules
from plugins.rope_paged_kv_write import cuda as kv_write
from plugins.triton_cache import PoolLayout
from plugins.triton_kernel import KernelSpec, Pointer, Size
from plugins.triton_ptx import CAPABILITIES, CompiledKernel, compile_ptx

BF16 = PoolLayout(torch.bfloat16, 16, 2, 64)
SCALAR = {"i32": "u32"}


def kernel_specs(capability: int, full: bool) -> Iterator[tuple[str, KernelSpec]]:
    """Every operator's name with each of its specialisations."""
    for name, module in modules("cuda_cases"):
        yield from ((name, spec) for spec in module.kernel_specs(capability, full))


def kernels(name: str) -> set[str]:
    """The kernels in the modules of an operator's folder."""
    files = (Path(plugins.__path__[0]) / name).glob("cuda*.py")
    return set(re.findall(r"^def (\w+)_kernel\(", "".join(file.read_text() for file in files), re.MULTILINE))


def entry(ptx: str) -> tuple[str, list[str]]:
    """Name and parameter types of the one entry."""
    (match,) = re.findall(r"\.entry\s+(\w+)\(([^)]*)\)", ptx)
    return match[0], re.findall(r"\.param\s+\.(\w+)", match[1])


def assemble(kernel: CompiledKernel, directory: Path) -> str:
    """What Triton's own assembler says of the PTX."""
    nvidia = triton.knobs.nvidia
    tool = nvidia.ptxas_blackwell if kernel.capability >= 100 else nvidia.ptxas
    architecture = f"sm_{kernel.capability}" + ("a" if kernel.capability >= 90 else "")
    source = directory / "kernel.ptx"
    source.write_text(kernel.ptx)
    result = subprocess.run(
        [tool.path, "-v", f"-arch={architecture}", str(source), "-o", str(directory / "kernel.cubin")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stderr


def test_the_pairs_compared_at_once_do_not_grow_with_the_places():
    """Else the compiler takes minutes for thousands of places."""
    constants = [dict(chunk_cache_update.kernel_spec(8, places).constants) for places in (256, 1000, 4096, 20_000)]
    assert [(c["BLOCK"], c["STEP"]) for c in constants] == [(256, 16), (1024, 16), (4096, 4), (32768, 1)]


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_kernel_compiles_to_what_it_declares(capability, full, tmp_path):
    compiled = set()
    for _, spec in kernel_specs(capability, full):
        kernel = compile_ptx(spec, capability)
        name, types = entry(kernel.ptx)
        assert name == kernel.entry == spec.function.__name__
        assert types == list(kernel.parameters) == [SCALAR.get(a.type, "u64") for a in spec.arguments], spec
        assert re.findall(r"\.reqntid\s+(\d+)", kernel.ptx) == [str(32 * spec.num_warps)] == [str(kernel.num_threads)]
        assert kernel.shared_bytes <= CAPABILITIES[capability] * 1024
        assert f".target sm_{capability}" in kernel.ptx
        assert ".loc" not in kernel.ptx and str(Path(plugins.__file__).parent) not in kernel.ptx
        assert ".extern .func" not in kernel.ptx  # nothing that the driver could not link
        if full or spec.name not in compiled:
            report = assemble(kernel, tmp_path)
            if capability == 90 and spec.inputs[0].dtype == torch.bfloat16:  # tensor cores, sums in registers
                assert "0 bytes spill stores" in report, (spec, report)
        compiled.add(spec.name)
    with_triton = [name for name, operator in plugins.OPERATORS.items() if "triton" in operator.backends]
    assert all(kernels(name) for name in with_triton)
    assert compiled == {kernel for name in with_triton for kernel in kernels(name)}


@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_take_the_operators_tensors_in_its_order_then_sizes_then_outputs(capability):
    taken: dict[str, set[str]] = {}
    outputs: dict[str, set[str]] = {}
    for operator, spec in kernel_specs(capability, full=True):
        schema = getattr(torch.ops.kvforge, operator).default._schema
        tensors = [a.name for a in schema.arguments if "Tensor" in str(a.type)]
        inputs = [p.name for p in spec.inputs if p.name in tensors]
        taken.setdefault(operator, set()).update(p.name for p in (*spec.inputs, *spec.outputs))
        assert inputs == [name for name in tensors if name in inputs]
        if "k_pool" in inputs and "k_scales" not in inputs:
            assert dict(spec.constants).get("k_scales", 0) is None or "k_scales" not in tensors
        written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        if not {*written}.isdisjoint(inputs):  # else it prepares what another kernel writes
            mutated = [name + "_out" for name in written if name in inputs]
            in_place = [p.name for p in spec.outputs if p.name in mutated]  # results may stand before them
            assert in_place == mutated[: len(spec.outputs)]
        outputs.setdefault(operator, set()).update(p.name for p in spec.outputs)
        assert {size.tensor for size in spec.sizes} <= {p.name for p in spec.inputs}
        assert list(spec.arguments) == [*spec.inputs, *spec.sizes, *spec.outputs]
    for operator, names in taken.items():  # nothing is ignored
        assert set(plugins.OPERATORS[operator].tensors) <= names
        assert {name + "_out" for name in plugins.OPERATORS[operator].writes} <= outputs[operator]


def test_a_kernel_whose_parameters_changed_is_refused():
    spec = kv_write.kernel_spec(BF16, torch.bfloat16)
    first, second, *rest = spec.inputs
    with pytest.raises(ValueError, match=r"rope_paged_kv_write: the kernel takes \(k, v, cos, .*declared \(v, k, cos"):
        replace(spec, inputs=(second, first, *rest))
    with pytest.raises(ValueError, match="the kernel takes"):
        replace(spec, sizes=())
    with pytest.raises(ValueError, match="the kernel takes"):
        replace(spec, constants=(*spec.constants, ("UNKNOWN", 1)))


@triton.jit
def copy_kernel(source, count, target, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + index, tl.load(source + index, index < count), index < count)


def copy_spec(**changes) -> KernelSpec:
    spec = KernelSpec(
        name="copy",
        function=copy_kernel,
        inputs=(Pointer("source", torch.float32),),
        sizes=(Size("count", "source", 0),),
        outputs=(Pointer("target", torch.float32),),
        constants=(("BLOCK", 128),),
        grid=lambda sizes: (sizes["count"], 1, 1),
    )
    for name, value in changes.items():  # past the check of the constructor
        object.__setattr__(spec, name, value)
    return spec


def test_a_compiled_kernel_that_differs_from_its_declaration_is_refused():
    assert compile_ptx(copy_spec(), 90).parameters == ("u64", "u32", "u64")
    with pytest.raises(plugins.PluginError, match="copy: the compiled kernel takes"):
        compile_ptx(copy_spec(inputs=(), outputs=(*copy_spec().inputs, *copy_spec().outputs)), 90)


def test_a_kernel_that_needs_more_shared_memory_than_the_gpu_has_is_refused(monkeypatch):
    spec = next(spec for _, spec in kernel_specs(80, full=False) if spec.name == "paged_attention_combine")
    monkeypatch.setitem(CAPABILITIES, 80, 16)
    with pytest.raises(plugins.PluginError, match=r"paged_attention_combine needs .* bytes of shared memory .* 16 KiB"):
        compile_ptx(spec, 80)


def test_unknown_capability_and_fp8_without_hardware_are_refused():
    with pytest.raises(plugins.PluginError, match="compute capabilities 80, 89, 90, 100, not 70"):
        compile_ptx(copy_spec(), 70)
    fp8 = kv_write.kernel_spec(PoolLayout(torch.float8_e4m3fn, 16, 2, 64, dynamic=True), torch.bfloat16)
    with pytest.raises(plugins.PluginError, match=r"FP8 KV cache needs compute capability 8.9, and this is 8.0"):
        compile_ptx(fp8, 80)
    with pytest.raises(plugins.PluginError, match="take no scales"):
        PoolLayout(torch.bfloat16, 16, 2, 64, dynamic=True)
