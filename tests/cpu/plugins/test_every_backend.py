"""Every backend of every operator against the operator's definition, on the same random cases.

TensorRT's backend is these Triton kernels as PTX: tests/trt checks the contract around them, tests/gpu runs them.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import pytest

import plugins
from plugins.operator import BACKEND_FILES
from tests.support.operators.backends import BACKENDS, check

ROOT = Path(plugins.__file__).parent.parent
NUM_CASES, NUM_QUICK_CASES, NUM_SMALL_CASES, NUM_BLOCKS = 320, 96, 12, 4
"""Cases of full size for the backends that are fast, and small ones for all; without --full fewer."""


def with_backend(backends: Iterable[str]) -> list[tuple[str, str]]:
    return [(one, name) for one in backends for name, operator in plugins.OPERATORS.items() if one in operator.backends]


def test_every_backend_is_run_here_but_the_definition_and_tensorrt():
    assert set(BACKEND_FILES) == {*BACKENDS, "reference", "tensorrt"}


@pytest.mark.parametrize("block", range(NUM_BLOCKS), ids="block{}".format)
@pytest.mark.parametrize(("backend", "name"), with_backend(["cpu", "onnx"]))
def test_full_size(backend, name, block, isas, monkeypatch, full):
    for isa in isas if backend == "cpu" else isas[:1]:
        monkeypatch.setenv("KVFORGE_CPU_ISA", isa)
        seeds = range(block, NUM_CASES if full else NUM_QUICK_CASES, NUM_BLOCKS)
        assert {seed: what for seed in seeds if (what := check(backend, name, seed, small=False))} == {}, isa


@pytest.fixture(scope="module")
def small_cases(full) -> Callable[[str], tuple[list[dict], int, str]]:
    """Of a backend: its cases of all operators, its exit status and what it said. Each backend has one process, and
    none this one: Triton's interpreter replaces the language for the whole process."""
    last, module = NUM_CASES if full else NUM_SMALL_CASES, "tests.support.operators.backends"

    @cache
    def run(backend: str) -> tuple[list[dict], int, str]:
        names = [name for _, name in with_backend([backend])]
        result = subprocess.run(
            [sys.executable, "-W", "ignore::RuntimeWarning", "-m", module, backend, "0", str(last), *names],
            capture_output=True,
            text=True,
            env=os.environ | {"TRITON_INTERPRET": "1", "OMP_WAIT_POLICY": "PASSIVE"},
            cwd=ROOT,
        )
        cases = [json.loads(line) for line in result.stdout.splitlines()]
        return cases, result.returncode, result.stderr[-3000:]

    return run


@pytest.mark.parametrize(("backend", "name"), with_backend(BACKENDS))
def test_small(backend, name, full, small_cases):
    found, status, said = small_cases(backend)
    assert status == 0, said
    cases = [case for case in found if case["operator"] == name]
    assert [case["seed"] for case in cases] == list(range(NUM_CASES if full else NUM_SMALL_CASES)), said
    assert [case for case in cases if case["wrong"]] == []
