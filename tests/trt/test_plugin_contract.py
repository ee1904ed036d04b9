"""Contract tests: every plugin against NVIDIA's own plugin classes, asked what the builder asks. No engine is built."""

import re
import subprocess
from pathlib import Path

import pytest
import torch
from onnx import helper

from plugins.cases import CacheFormat
from plugins.errors import PluginError
from plugins.onnx_nodes import ONNX_NODES
from plugins.paged_attention.trt_cases import attention_case
from plugins.registry import modules
from plugins.triton_ptx import CAPABILITIES
from plugins.trt_case import Dynamic, NetworkTensor, PluginCase
from plugins.trt_plugin import InputTensor
from plugins.trt_plugins import PLUGINS, register_plugins
from plugins.trt_target import compile_for, nearest_capability
from tests.trt.aot_driver import ask, create_plugin

CASES = [case for _, module in modules("trt_cases") for case in module.plugin_cases()]


def case_id(case: PluginCase) -> str:
    kinds = dict.fromkeys(str(tensor.dtype).removeprefix("torch.") for tensor in case.inputs)
    return f"{case.plugin}-{'-'.join(kinds)}"


@pytest.fixture(autouse=True)
def _registered(trt):
    register_plugins()
    register_plugins()  # a second call changes nothing


def entry_parameters(ptx: str, entry: str) -> list[str]:
    """PTX types of the parameters of the one entry point."""
    text = re.search(rf"\.visible \.entry {entry}\((.*?)\)", ptx, re.DOTALL)
    assert text is not None and ptx.count(".entry") == 1
    return re.findall(r"\.param \.(\w+)", text[1])


def assemble(ptx: str, capability: int, folder: Path) -> str:
    """What NVIDIA's assembler (part of Triton) reports of the text; raises when it refuses it."""
    nvidia = pytest.importorskip("triton.backends.nvidia")
    source = folder / "kernel.ptx"
    source.write_text(ptx)
    arch = f"sm_{capability}" + ("a" if capability >= 90 else "")
    command = [Path(nvidia.__file__).parent / "bin" / "ptxas", "-v", f"--gpu-name={arch}", source, "-o", folder / "x"]
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stderr


def has_fp8(case: PluginCase) -> bool:
    return any(tensor.dtype == torch.float8_e4m3fn for tensor in case.inputs)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_builder_questions(trt, monkeypatch, case):
    with compile_for(90):
        answers = ask(trt, monkeypatch, case.plugin, case.inputs, case.attributes)
    assert answers.outputs == case.outputs
    assert answers.aliases == case.aliases
    types = (*(tensor.dtype for tensor in case.inputs), *(dtype for dtype, _ in case.outputs))
    assert answers.combinations.count(types) == 1
    num_inputs, num_outputs = len(case.inputs), len(case.outputs)
    expected = ["u64"] * num_inputs + ["u32"] * len(answers.extra) + ["u64"] * num_outputs
    assert entry_parameters(answers.ptx, answers.entry) == expected
    assert re.findall(r"\.reqntid (\d+)", answers.ptx) == [str(answers.block[0])]
    assert answers.block[1:] == (1, 1) and all(isinstance(size, int) for size in answers.grid)
    assert answers.shared_bytes <= CAPABILITIES[90] * 1024


@pytest.mark.parametrize("case", [case for case in CASES if max(case.aliases.values()) >= 0], ids=case_id)
def test_in_place_kernels_write_through_their_inputs(trt, monkeypatch, case):
    """So it does not matter whether a kernel is given an aliased output as an argument of its own."""
    with compile_for(90):
        answers = ask(trt, monkeypatch, case.plugin, case.inputs, case.attributes)
    loaded = {int(index) for index in re.findall(rf"\[{answers.entry}_param_(\d+)", answers.ptx)}
    declared = {int(index) for index in re.findall(rf"\.param .*{answers.entry}_param_(\d+)", answers.ptx)}
    first_output = len(declared) - len(case.outputs)
    in_place = {first_output + output for output, given in case.aliases.items() if given >= 0}
    assert declared == set(range(len(declared))) and first_output >= len(case.inputs)
    assert set(range(len(case.inputs))) <= loaded and not loaded & in_place


@pytest.mark.with_full(capability=(89, 100))
@pytest.mark.parametrize("capability", (80, 89, 100))
def test_other_gpus(trt, monkeypatch, tmp_path, full, capability):
    """Each kernel once, with an FP8 cache where the GPU has FP8 (all cases with --full)."""
    seen: set[str] = set()
    for case in sorted(CASES, key=has_fp8, reverse=True):
        kind = case.plugin.removesuffix("Dynamic")
        if (has_fp8(case) and capability < 89) or (kind in seen and not full):
            continue
        seen.add(kind)
        with compile_for(capability):
            answers = ask(trt, monkeypatch, case.plugin, case.inputs, case.attributes)
        target = f"sm_{capability}" + ("a" if capability >= 90 else "")
        assert re.findall(r"\.target (\w+)", answers.ptx) == [target]
        assert answers.shared_bytes <= CAPABILITIES[capability] * 1024
        assemble(answers.ptx, capability, tmp_path)
    assert seen == {name.removesuffix("Dynamic") for name in PLUGINS}


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_assembler_takes_the_ptx(trt, monkeypatch, tmp_path, case):
    with compile_for(90):
        answers = ask(trt, monkeypatch, case.plugin, case.inputs, case.attributes)
    assert re.search(r"Used \d+ registers", assemble(answers.ptx, 90, tmp_path))


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_kernel_is_the_one_that_pytorch_launches(trt, monkeypatch, case):
    """The grid and the extra arguments of the plugin are those of `run_kernel` for the same sizes."""
    inputs = dict(zip(PLUGINS[case.plugin].inputs, case.inputs, strict=True))
    described = {name: InputTensor(tensor.dtype, tuple(map(int, tensor.shape))) for name, tensor in inputs.items()}
    spec = PLUGINS[case.plugin].spec(described, case.attributes, 90)
    sizes = {size.name: int(inputs[size.tensor].shape[size.dim]) for size in spec.sizes}
    with compile_for(90):
        answers = ask(trt, monkeypatch, case.plugin, case.inputs, case.attributes)
    assert answers.grid == tuple(spec.grid(sizes))
    assert answers.extra == list(sizes.values())
    assert answers.block[0] == 32 * spec.num_warps


def test_fp8_cache_needs_a_gpu_with_fp8(trt, monkeypatch):
    case = attention_case(0, CacheFormat(torch.float8_e4m3fn), torch.float16)
    with compile_for(80), pytest.raises(PluginError, match=r"FP8 KV cache needs compute capability 8\.9.*int8"):
        ask(trt, monkeypatch, case.plugin, case.inputs, case.attributes)


def test_fixed_dimensions_must_be_fixed(trt, monkeypatch):
    case = attention_case(0, CacheFormat(), torch.float16)
    pools = [NetworkTensor(tensor.dtype, tuple(map(Dynamic, tensor.shape))) for tensor in case.inputs[1:3]]
    with compile_for(90), pytest.raises(PluginError, match="must be a constant of the network"):
        ask(trt, monkeypatch, case.plugin, (case.inputs[0], *pools, *case.inputs[3:]), case.attributes)


def test_scales_of_a_float_cache_are_refused(trt, monkeypatch):
    case = attention_case(0, CacheFormat(), torch.float16)
    with compile_for(90), pytest.raises(PluginError, match="take no scales"):
        ask(trt, monkeypatch, case.plugin, case.inputs, {**case.attributes, "k_scale": 0.5})


def test_every_plugin_is_asked():
    assert {case.plugin for case in CASES} == set(PLUGINS)


@pytest.mark.parametrize("name", PLUGINS)
def test_creator_declares_the_attributes(trt, name):
    fields = trt.get_plugin_registry().get_creator(name, "1", "kvforge").field_names
    assert [field.name for field in fields] == [attribute for attribute, _ in PLUGINS[name].attributes]


@pytest.mark.parametrize("operator", ONNX_NODES.values(), ids=lambda operator: operator.name)
def test_onnx_nodes_fit_the_plugins(trt, operator):
    plugin = PLUGINS[operator.name]
    assert plugin.inputs == operator.inputs and plugin.num_outputs == len(operator.outputs)
    assert plugin.attributes == operator.attributes
    attributes = {name: kind(1) for name, kind in operator.attributes}
    node = operator.node(list(operator.inputs), list(operator.outputs), **attributes)
    carried = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    assert (carried.pop("plugin_namespace"), carried.pop("plugin_version")) == (b"kvforge", b"1")
    assert create_plugin(trt, operator.name, carried).attrs == attributes


@pytest.mark.parametrize(
    ("gpu", "compiled"), ((80, 80), (86, 80), (89, 89), (90, 90), (100, 100), (103, 89), (120, 89))
)
def test_code_for_gpus_between(gpu, compiled):
    assert nearest_capability(gpu) == compiled


def test_too_old_a_gpu():
    with pytest.raises(PluginError, match=r"this GPU has 7\.5"):
        nearest_capability(75)
