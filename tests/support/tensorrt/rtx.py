"""Asks TensorRT for RTX in a process of its own: two flavours of TensorRT do not live in one.

    answer = ask_rtx("api_names", question)

calls `answer(trt, question)` of `tests.support.tensorrt.api_names` there; question and answer are JSON.
"""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]


def skip_without_rtx() -> None:
    """Skip the test where RTX is not installed."""
    if importlib.util.find_spec("tensorrt_rtx_bindings") is None:
        pytest.skip("needs the extra tensorrt-rtx")


def ask_rtx(program: str, question: Any) -> Any:
    """Return the program's answer; skips the test where RTX is not installed."""
    skip_without_rtx()
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.tensorrt.rtx", program]
    result = subprocess.run(
        command,
        input=json.dumps(question),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout.splitlines()[-1])


def built_by_rtx(program: str, questions: Sequence[Any]) -> list[Any]:
    """Answers of a program that takes a list of questions, where sources alone decide them: each is kept with the
    engines of tests."""
    from tests.support.models.kept_answers import kept_answers

    skip_without_rtx()
    versions = ("tensorrt-rtx-cu13-bindings", "onnx")
    return kept_answers(f"tests.support.tensorrt.{program}", questions, lambda asked: ask_rtx(program, asked), versions)


def main(program: str) -> None:
    """Answer the question on standard input in the last line of standard output."""
    from kvforge.tensorrt.api import trt

    answer = importlib.import_module(f"tests.support.tensorrt.{program}").answer
    print(json.dumps(answer(trt, json.load(sys.stdin))))


if __name__ == "__main__":
    main(sys.argv[1])
