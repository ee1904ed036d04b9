"""Contract tests: every plugin against NVIDIA's own plugin classes, asked what the builder asks. No engine is built."""

import re
import subprocess
from pathlib import Path

import pytest

from plugins.triton_ptx import CAPABILITIES
from plugins.trt_plugins import register_plugins
from plugins.trt_target import compile_for
from tests.trt.aot_driver import ask
from tests.trt.plugin_cases import all_cases, case_id

CASES = all_cases()


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
