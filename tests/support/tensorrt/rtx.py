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


def ask_rtx(program: str, question: Any) -> Any:
    """Return the program's answer; skips the test where RTX is not installed."""
    if importlib.util.find_spec("tensorrt_rtx_bindings") is None:
        pytest.skip("needs the extra tensorrt-rtx")
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


def main(program: str) -> None:
    """Answer the question on standard input in the last line of standard output."""
    from kvforge.tensorrt.api import trt

    answer = importlib.import_module(f"tests.support.tensorrt.{program}").answer
    print(json.dumps(answer(trt, json.load(sys.stdin))))


if __name__ == "__main__":
    main(sys.argv[1])
