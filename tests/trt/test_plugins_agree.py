"""The plugins of TensorRT 11, of TensorRT for RTX and in C++ are one definition: on random cases they say the same.

TensorRT 11's are asked through NVIDIA's plugin classes, RTX's by its own parser and builder.
"""

import dataclasses
import functools
import os
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from plugins import trt_aot, trt_cpp
from plugins.registry import modules
from plugins.trt_case import Dynamic, NetworkTensor, PluginCase
from plugins.trt_cpp import compile_library, descriptions
from plugins.trt_launch import Launch, launches
from plugins.trt_plugin import InputTensor
from plugins.trt_plugins import PLUGINS, register_plugins
from plugins.trt_target import compile_for
from tests.support.random_cases import Seeds
from tests.support.tensorrt.descriptions import as_json
from tests.support.tensorrt.library import ask_library
from tests.support.tensorrt.rtx import ask_rtx
from tests.trt.aot_driver import ask, create_plugin

NUM_CASES = 240
LARGEST = 5000


@pytest.fixture
def random_cases(seeds: Seeds) -> list[PluginCase]:
    """The plugins' cases with other sizes: each once with the same on every day, and as many again with the day's."""
    found = [case for _, module in modules("trt_cases") for case in module.plugin_cases()]
    return [_resized(found[seed % len(found)], random.Random(seed)) for seed in seeds(2 * len(found), NUM_CASES)]


def _resized(case: PluginCase, rng: random.Random) -> PluginCase:
    def tensor(given: NetworkTensor) -> NetworkTensor:
        sizes = tuple(Dynamic(rng.randint(1, LARGEST)) if isinstance(n, Dynamic) else n for n in given.shape)
        return NetworkTensor(given.dtype, sizes)

    return dataclasses.replace(case, inputs=tuple(map(tensor, case.inputs)))


def name(dtype) -> str:
    return str(dtype).removeprefix("torch.")


def test_a_library_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "NvInferRuntime.h").touch()
    missing = tmp_path / "missing" / "folder" / "library.so"
    assert trt_cpp.main(["--headers", str(tmp_path), "-o", str(missing)]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"trt_cpp: error: {missing} cannot be written (No such file or directory); name a file in a")


def test_random_cases(trt, random_cases: list[PluginCase], monkeypatch: pytest.MonkeyPatch) -> None:
    assert {case.plugin for case in random_cases} == set(PLUGINS)
    register_plugins()
    monkeypatch.setattr(trt_aot, "compile_ptx", compiled_once(trt_aot.compile_ptx))
    described = []
    with compile_for(90):
        for case in random_cases:
            answers = ask(trt, monkeypatch, case.plugin, case.inputs, case.attributes)
            creator = trt.get_plugin_registry().get_creator(case.plugin, "1", "kvforge")
            described.append(
                {
                    "fields": [field.name for field in creator.field_names],
                    "attributes": create_plugin(trt, case.plugin, case.attributes).attrs,
                    "outputs": [[name(dtype), list(shape)] for dtype, shape in answers.outputs],
                    "aliases": [answers.aliases[index] for index in range(len(answers.outputs))],
                    "combinations": sorted([name(dtype) for dtype in types] for types in answers.combinations),
                    "grid": list(answers.grid),
                    "threads": answers.block[0],
                    "shared_bytes": answers.shared_bytes,
                    "extra": answers.extra,
                    "entry": answers.entry,
                    "ptx": answers.ptx,
                    "started": started(answers.grid, len(case.inputs), answers.extra, len(answers.outputs)),
                }
            )
    asked = [as_json(case.plugin, case.inputs, case.attributes) for case in random_cases]
    for case, ours, theirs in zip(random_cases, ask_rtx("descriptions", asked), described, strict=True):
        assert ours == theirs, case


def started(grid: tuple[int, ...], num_inputs: int, extra: list[int], num_outputs: int) -> list:
    """What TensorRT 11 would start: the kernel's arguments are inputs, sizes, outputs."""
    places = [["at", place] for place in range(1, num_inputs + num_outputs + 1)]
    return [list(grid), [*places[:num_inputs], *extra, *places[num_inputs:]], 77]


def test_the_c_plus_plus_library(headers: Path, random_cases: list[PluginCase], tmp_path: Path) -> None:
    """Compiled, loaded by TensorRT for RTX, and built into plans: it says and starts what the Python plugins do."""
    asked = [as_json(case.plugin, case.inputs, case.attributes) for case in random_cases]
    answers = ask_rtx("cpp_plugins", {"headers": str(headers), "cases": asked})
    compile_library(headers, tmp_path / "library.so")
    told = ask_library(headers, tmp_path / "library.so", asked, list(map(launch_of, asked)))
    built = set()
    for case, ours, said, theirs in zip(asked, answers, told, ask_rtx("descriptions", asked), strict=True):
        assert ours["fields"] == theirs["fields"] and ours["outputs"] == theirs["outputs"], case
        assert said == {name: theirs[name] for name in ("aliases", "combinations", "started")}, case
        for kernels in ours.get("kernels", ()):
            assert kernels == [{"entry": theirs["entry"], "capability": 90}]
            built.add(case["plugin"])
    assert built == set(PLUGINS)


def test_descriptions_for_c_plus_plus_name_dimensions_that_inputs_have(random_cases: list[PluginCase]) -> None:
    ranks = {case.plugin: [len(given.shape) for given in case.inputs] for case in random_cases}
    definitions = re.findall(r'^\{"(\w+)", (\d+), (.*)\},$', descriptions(), re.MULTILINE)
    assert {name for name, _, _ in definitions} == set(PLUGINS)
    for name, num_inputs, rest in definitions:
        assert int(num_inputs) == len(ranks[name])
        assert all(int(dim) < ranks[name][int(index)] for index, dim in re.findall(r"\bi(\d+)\.(\d+)\b", rest)), name


def launch_of(case: dict[str, Any]) -> Launch:
    definition = PLUGINS[case["plugin"]]
    shapes = [tuple(-1 if isinstance(size, list) else size for size in shape) for _, shape in case["inputs"]]
    dtypes = [getattr(torch, name) for name, _ in case["inputs"]]
    tensors = dict(zip(definition.inputs, map(InputTensor, dtypes, shapes), strict=True))
    (launch,) = launches(definition, tensors, case["attributes"], [90])
    return launch


@pytest.fixture
def headers() -> Path:
    """TensorRT's public headers: the folder `include` of NVIDIA's repository, where a variable says that it is."""
    folder = os.environ.get("KVFORGE_TENSORRT_HEADERS")
    if folder is None:
        pytest.skip("needs TensorRT's headers: KVFORGE_TENSORRT_HEADERS names the folder include of NVIDIA/TensorRT")
    return Path(folder)


def test_a_folder_without_headers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    library = tmp_path / "library.so"
    assert trt_cpp.main(["--headers", str(tmp_path), "-o", str(library)]) == 1 and not library.exists()
    said = capsys.readouterr().err
    assert said.startswith(f"trt_cpp: error: {tmp_path} has no NvInferRuntime.h; give the folder include")
    (tmp_path / "NvInferRuntime.h").write_text("#error another TensorRT\n")
    assert trt_cpp.main(["--headers", str(tmp_path), "-o", str(library)]) == 1 and not library.exists()
    assert "did not compile the plugins' library (" in capsys.readouterr().err


def test_nothing_is_started_for_an_empty_step(random_cases: list[PluginCase]) -> None:
    case = next(case for case in random_cases if case.plugin == "RopePagedKvWrite")
    empty = dataclasses.replace(
        case, inputs=tuple(NetworkTensor(t.dtype, (Dynamic(0), *t.shape[1:])) for t in case.inputs)
    )
    (described,) = ask_rtx("descriptions", [as_json(case.plugin, empty.inputs, case.attributes)])
    assert 0 in described["grid"] and described["started"] == []


def compiled_once(compile_ptx):
    """Kernels do not depend on the sizes that differ from step to step."""
    from plugins.cuda_driver import spec_key

    kept = {}

    @functools.wraps(compile_ptx)
    def compiled(spec, capability):
        key = (*spec_key(spec), capability)
        if key not in kept:
            kept[key] = compile_ptx(spec, capability)
        return kept[key]

    return compiled
