"""Asks TensorRT for RTX in a process of its own: two flavours of TensorRT do not live in one.

    answer = ask_rtx("api_names", question)

calls `answer(trt, question)` of `tests.support.tensorrt.api_names` there; question and answer are JSON.
"""

import gc
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
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
    (answer,) = _answers(program, [question])
    return answer


def _answers(program: str, questions: Sequence[Any]) -> Iterator[Any]:
    """Yield the program's answer to each question, as soon as it has it. One process answers them all."""
    skip_without_rtx()
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.tensorrt.rtx", program]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryFile("w+") as asked, tempfile.TemporaryFile("w+") as said:
        json.dump(questions, asked)
        asked.seek(0)
        with subprocess.Popen(
            command, stdin=asked, stdout=subprocess.PIPE, stderr=said, text=True, cwd=ROOT, env=environment
        ) as process:
            assert process.stdout is not None
            try:
                yield from map(json.loads, process.stdout)
            except BaseException:
                process.kill()
                raise
        said.seek(0)
        assert process.returncode == 0, said.read()[-4000:]


def built_by_rtx(program: str, questions: Sequence[Any]) -> list[Any]:
    """Answers of a program where sources alone decide them: each is kept with the engines of tests."""
    from tests.support.models.kept_answers import kept_answers

    skip_without_rtx()
    versions = ("tensorrt-rtx-cu13-bindings", "onnx")
    return kept_answers(
        f"tests.support.tensorrt.{program}", questions, lambda asked: _answers(program, asked), versions
    )


def main(program: str) -> None:
    """Answer the questions on standard input, each in a line of standard output, to which nothing else is written."""
    from kvforge.tensorrt.api import trt

    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        answer = importlib.import_module(f"tests.support.tensorrt.{program}").answer
        gc.freeze()  # a tenth of an export is looking for garbage among modules
        for question in json.load(sys.stdin):
            print(json.dumps(answer(trt, question)), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
