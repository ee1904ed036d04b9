"""The Triton kernels under Triton's interpreter against the operators' references, on the shared random cases."""

import json
import os

import pytest

import plugins
from tests.support import warm

NUM_CASES, NUM_FULL_CASES = 37, 320
WITH_TRITON = [name for name, operator in plugins.OPERATORS.items() if "triton" in operator.backends]


def run(name: str, seeds: list[int]) -> list[dict]:
    """Runs cases in a process of its own: the interpreter replaces Triton's language for the whole process."""
    arguments = ["-W", "ignore::RuntimeWarning", "-m", "tests.support.cuda.triton_cases"]
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": "."}
    result = warm.run([*arguments, name, ",".join(map(str, seeds))], env)
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.parametrize("name", [*WITH_TRITON, "invariances", "llama", "steps", "large"])
def test_equals_the_reference(name, seeds):
    depth = {"invariances": (5, 64), "llama": (3, 6), "large": (1, 1)}.get(name, (NUM_CASES, NUM_FULL_CASES))
    cases = run(name, seeds(*depth))
    assert [case["seed"] for case in cases] == seeds(*depth)
    assert [case for case in cases if case["error"]] == []
