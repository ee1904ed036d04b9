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


def built_by_rtx(program: str, question: Any) -> Any:
    """As ``ask_rtx`` where the answer depends on sources alone: it is kept with the engines of tests."""
    from tests.support.models.kept_answers import kept_answer

    skip_without_rtx()
    versions = ("tensorrt-rtx-cu13-bindings", "onnx")
    module = f"tests.support.tensorrt.{program}"
    return kept_answer(module, question, lambda: ask_rtx(program, question), versions)


def main(program: str) -> None:
    """Answer the question on standard input in the last line of standard output."""
    from kvforge.tensorrt.api import trt

    answer = importlib.import_module(f"tests.support.tensorrt.{program}").answer
    print(json.dumps(answer(trt, json.load(sys.stdin))))


if __name__ == "__main__":
    main(sys.argv[1])
