"""Building plans without a builder: what is asked of it, and its refusals as one sentence.

Builder, network and parser are stand-ins; that what is called exists in TensorRT is `test_api_names`' business.
"""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from kvforge.common.errors import BuildError
from kvforge.compiler.options import ResolvedOptions
from kvforge.tensorrt import tensorrt11
from plugins.trt_target import compile_for

NEITHER = "{'tensorrt': None, 'tensorrt_rtx_bindings': None}"
BROKEN_RTX = """
import importlib.machinery, types
module = types.ModuleType("tensorrt_rtx_libs")
module.__spec__ = importlib.machinery.ModuleSpec("tensorrt_rtx_libs", None, is_package=True)
module.__spec__.submodule_search_locations = ["/nowhere"]
RTX_WITHOUT_ITS_LIBRARY = {"tensorrt_rtx_libs": module}
"""
OPTIONS = ResolvedOptions("tensorrt", "bfloat16", "bfloat16", 8, 100, 1000, 32)


class Profile:
    def __init__(self):
        self.shapes = {}

    def set_shape(self, name, minimum, optimum, maximum):
        self.shapes[name] = (minimum, optimum, maximum)


class Config:
    def __init__(self):
        self.features, self.profiles, self.caches = {}, [], []

    def set_preview_feature(self, feature, on):
        self.features[feature.name] = on

    def add_optimization_profile(self, profile):
        self.profiles.append(profile)

    def create_timing_cache(self, data):
        self.caches.append(data)
        if data == b"damaged":
            return None
        return SimpleNamespace(serialize=lambda: b"times")

    def set_timing_cache(self, cache, ignore_mismatch):
        return not ignore_mismatch


class Parser:
    num_errors = 1

    def __init__(self, network, logger):
        self.network = network

    def parse_from_file(self, path):
        self.network.path = path
        return self.network.parses

    def get_error(self, index):
        return "In node 3: no importer for Foo\nassertion"


class Builder:
    plan = b"plan"
    parses = True
    inputs = (("input_ids", (-1,)), ("k_pool_0", (-1, 32, 8, 128)))

    def __init__(self, logger):
        self.logger, self.config = logger, Config()
        Builder.last = self

    def create_network(self, flags):
        tensors = [SimpleNamespace(name=name, shape=shape) for name, shape in self.inputs]
        return SimpleNamespace(num_inputs=len(tensors), get_input=tensors.__getitem__, parses=self.parses)

    def create_builder_config(self):
        return self.config

    def create_optimization_profile(self):
        return Profile()

    def build_serialized_network(self, network, config):
        if self.plan is None:
            self.logger.log(self.severity, "no kernel for node attend\nstack")
        return self.plan


@pytest.fixture
def build(trt, monkeypatch, tmp_path):
    """Builds `lower` with the stand-ins, for capability 9.0; returns the plan's path."""
    from kvforge.compiler import tensorrt_build

    monkeypatch.setenv("KVFORGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(trt, "OnnxParser", Parser)
    monkeypatch.setattr(Builder, "severity", trt.ILogger.Severity.ERROR, raising=False)
    monkeypatch.setattr(trt, "Builder", Builder)

    def run():
        plan = tmp_path / "lower.plan"
        with compile_for(90):
            tensorrt_build.build_plan("lower", tmp_path / "lower.onnx", plan, OPTIONS)
        return plan

    return run


def test_what_is_asked_of_the_builder(build):
    assert build().read_bytes() == b"plan"
    config = Builder.last.config
    assert config.features == {"ALIASED_PLUGIN_IO_10_03": True}
    decode, mixed = config.profiles
    assert decode.shapes["input_ids"] == ((1,), (8,), (8,))
    assert mixed.shapes["input_ids"] == ((1,), (100,), (100,))
    assert mixed.shapes["k_pool_0"] == ((1, 32, 8, 128), (256, 32, 8, 128), (256, 32, 8, 128))


def test_measured_times_are_kept(build, tmp_path):
    build()
    build()
    assert Builder.last.config.caches == [b"times"]
    (file,) = (tmp_path / "cache").iterdir()
    file.write_bytes(b"damaged")
    build()
    assert Builder.last.config.caches == [b"damaged", b""] and file.read_bytes() == b"times"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    (
        ("parses", False, r"did not build the graph lower \(In node 3: no importer for Foo\)"),
        ("plan", None, r"did not build the graph lower \(no kernel for node attend\)"),
        ("inputs", (("k_pool_0", (-1, 32, -1, 128)),), r"k_pool_0 has shape .*; write it again"),
    ),
)
def test_refusals(build, monkeypatch, tmp_path, name, value, message):
    monkeypatch.setattr(Builder, name, value)
    with pytest.raises(BuildError, match=message) as caught:
        build()
    assert "\n" not in str(caught.value) and not (tmp_path / "lower.plan").exists()


def test_fp8_needs_a_gpu_with_fp8():
    with compile_for(80), pytest.raises(BuildError, match=r"8\.9"):
        tensorrt11.capabilities("auto", torch.float8_e4m3fn)
    with compile_for(89):
        assert tensorrt11.capabilities("auto", torch.float8_e4m3fn) == (89,)


def test_tensorrt_11_builds_for_the_gpu_that_is_there():
    with compile_for(89), pytest.raises(BuildError, match="leave --compute-capabilities out"):
        tensorrt11.capabilities("8.0", torch.bfloat16)
    with pytest.raises(BuildError, match="There is no GPU"):
        tensorrt11.capabilities("current", torch.bfloat16)


def test_progress_bars(trt):
    from kvforge.compiler.tensorrt_build import ProgressBars

    bars = ProgressBars()
    bars.phase_start("Building", None, 4)
    assert bars.step_complete("Building", 2) and bars._bars["Building"].n == 3
    bars.phase_finish("Building")
    assert bars._bars == {} and bars.step_complete("Building", 3)


@pytest.mark.parametrize("module", ("kvforge.compiler.tensorrt_build", "kvforge.runtime.sessions.tensorrt"))
@pytest.mark.parametrize(
    ("modules", "words"),
    (
        (NEITHER, ("There is no TensorRT", "pip install -e '.[tensorrt-rtx]'", "pip install -e '.[tensorrt]'")),
        ("{'tensorrt': None, **RTX_WITHOUT_ITS_LIBRARY}", ("TensorRT for RTX cannot be imported", "[tensorrt-rtx]")),
    ),
)
def test_without_tensorrt(module, modules, words):
    code = f"{BROKEN_RTX}\nimport importlib, sys\nsys.modules.update({modules})\nimportlib.import_module('{module}')"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = result.stderr.strip().splitlines()[-1]
    assert "MissingToolError" in last and all(word in last for word in words)


@pytest.mark.parametrize(
    "modules, message",
    (
        ("{'tensorrt': None, 'tensorrt_rtx_bindings': None, 'onnx': None}", "There is no TensorRT"),
        ("{'tensorrt': types.ModuleType('tensorrt'), 'onnx': None}", "Target tensorrt writes ONNX, which needs onnx;"),
    ),
)
def test_the_script_stops_before_any_work(tmp_path, modules, message):
    script = "runpy.run_path('build/build_tensorrt.py', run_name='__main__')"
    code = f"import runpy, sys, types; sys.modules.update({modules}); {script}"
    result = subprocess.run(
        [sys.executable, "-c", code, "nowhere", "-o", str(tmp_path / "engine")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1 and result.stderr.startswith(f"build_tensorrt: error: {message}")
    assert len(result.stderr.splitlines()) == 1 and list(tmp_path.iterdir()) == []
