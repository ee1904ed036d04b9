"""Every backend of every operator against the operator's definition, on the same random cases.

Triton's kernels are in test_triton_kernels.py, in processes of their own. TensorRT's backend is these as PTX: tests/trt
checks the contract around them, tests/gpu runs them.
"""

from collections.abc import Iterable

import pytest

import plugins
from plugins.operator import BACKEND_FILES
from tests.support.operators.backends import BACKENDS, check

NUM_CASES, NUM_QUICK_CASES, NUM_SMALL_CASES, NUM_BLOCKS = 320, 96, 12, 4
"""Cases of full size, and small ones; without --full fewer."""


def with_backend(backends: Iterable[str]) -> list[tuple[str, str]]:
    return [(one, name) for one in backends for name, operator in plugins.OPERATORS.items() if one in operator.backends]


def test_every_backend_is_run_here_but_the_definition_and_tensorrt():
    assert set(BACKEND_FILES) == {*BACKENDS, "reference", "tensorrt"}


@pytest.mark.parametrize("block", range(NUM_BLOCKS), ids="block{}".format)
@pytest.mark.parametrize(("backend", "name"), with_backend(["cpu", "onnx"]))
def test_full_size(backend, name, block, isas, monkeypatch, seeds):
    for isa in isas if backend == "cpu" else isas[:1]:
        monkeypatch.setenv("KVFORGE_CPU_ISA", isa)
        cases = [NUM_BLOCKS * each + block for each in seeds(NUM_QUICK_CASES // NUM_BLOCKS, NUM_CASES // NUM_BLOCKS)]
        assert {seed: what for seed in cases if (what := check(backend, name, seed, small=False))} == {}, isa


@pytest.mark.parametrize(("backend", "name"), with_backend(["cpu", "onnx"]))
def test_small(backend, name, one_thread, seeds):
    cases = seeds(NUM_SMALL_CASES, NUM_CASES)
    assert {seed: what for seed in cases if (what := check(backend, name, seed, small=True))} == {}
