"""Every face of every operator against the operator's definition, on the same random cases.

TensorRT's face is these Triton kernels as PTX: tests/trt checks the contract around them, tests/gpu runs them.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

import plugins
from tests.support.operator_faces import FACES, check

ROOT = Path(plugins.__file__).parent.parent
NUM_CASES, NUM_SMALL_CASES, NUM_BLOCKS = 320, 40, 4
"""Cases of full size for the faces that are fast, and small ones for all."""


FILES = {"cpu": "cpu.cpp", "onnx": "onnx.py", "triton": "cuda.py", "tensorrt": "trt.py"}
"""The file that an operator has when it has the face."""


def faced(faces: Iterable[str]) -> list[tuple[str, str]]:
    return [(face, name) for face in faces for name in plugins.OPERATORS if face in plugins.OPERATORS[name].faces]


def test_the_table_names_the_faces_that_are_tested_here():
    assert FILES.keys() == {*FACES, "tensorrt"}
    for name, operator in plugins.OPERATORS.items():
        existing = {face for face, file in FILES.items() if (ROOT / "plugins" / name / file).exists()}
        assert set(operator.faces) == {"reference"} | existing, name


@pytest.mark.parametrize("block", range(NUM_BLOCKS), ids="block{}".format)
@pytest.mark.parametrize(("face", "name"), faced(["cpu", "onnx"]))
def test_full_size(face, name, block, isas, monkeypatch):
    for isa in isas if face == "cpu" else isas[:1]:
        monkeypatch.setenv("KVFORGE_CPU_ISA", isa)
        seeds = range(block, NUM_CASES, NUM_BLOCKS)
        assert {seed: what for seed in seeds if (what := check(face, name, seed, small=False))} == {}, isa


@pytest.mark.parametrize(("face", "name"), faced(FACES))
def test_small(face, name, full):
    """In a process of its own: Triton's interpreter replaces the language for the whole process."""
    last = NUM_CASES if full else NUM_SMALL_CASES
    module = "tests.support.operator_faces"
    result = subprocess.run(
        [sys.executable, "-W", "ignore::RuntimeWarning", "-m", module, face, name, "0", str(last)],
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_WAIT_POLICY": "PASSIVE"},
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    cases = [json.loads(line) for line in result.stdout.splitlines()]
    assert [case["seed"] for case in cases] == list(range(last))
    assert [case for case in cases if case["wrong"]] == []
