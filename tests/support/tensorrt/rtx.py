"""Asks TensorRT for RTX in a process of its own: two flavours of TensorRT do not live in one.

    answer = ask_rtx("api_names", question)

calls `answer(trt, question)` of `tests.support.tensorrt.api_names` there; question and answer are JSON.
"""

import hashlib
import importlib
import importlib.metadata
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
    """As ``ask_rtx`` where the answer depends on the product's sources and those of the tests' support alone: it is
    built once for all runs of a tree, as engines are."""
    from filelock import FileLock

    from tests.support.models.shelf import shared_folder

    skip_without_rtx()
    digest = hashlib.sha256(f"{program}\0{json.dumps(question)}".encode())
    for file in sorted((ROOT / "tests" / "support").rglob("*.py")):
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    digest.update(importlib.metadata.version("tensorrt-rtx-cu13-bindings").encode())
    kept = shared_folder() / f"rtx-{program}-{digest.hexdigest()[:16]}.json"
    with FileLock(f"{kept}.lock"):
        if not kept.is_file():
            half = kept.with_suffix(".half")
            half.write_text(json.dumps(ask_rtx(program, question)))
            half.rename(kept)
        return json.loads(kept.read_text())


def main(program: str) -> None:
    """Answer the question on standard input in the last line of standard output."""
    from kvforge.tensorrt.api import trt

    answer = importlib.import_module(f"tests.support.tensorrt.{program}").answer
    print(json.dumps(answer(trt, json.load(sys.stdin))))


if __name__ == "__main__":
    main(sys.argv[1])
