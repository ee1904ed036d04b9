"""Answers by instruction set: the program on the tiny models, two prompts a task."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvforge.common.hardware import available_isas


@pytest.mark.skipif(len(available_isas()) < 2, reason="this machine has one instruction set")
def test_every_set_answers_and_is_compared_with_the_first(tmp_path: Path, full: bool) -> None:
    if not full:
        pytest.skip("builds two engines; --full")
    best, other = available_isas()[-1], available_isas()[-2]
    command = [sys.executable, "-m", "perf.quality.paths", "--isa", best, "--isa", other, "--num-prompts", "2"]
    options = ["--weights", "bfloat16", "--length", "200", "--work", str(tmp_path), "--output", str(tmp_path / "paths")]
    subprocess.run([*command, *options], check=True, env=os.environ, timeout=500)
    rows = json.loads((tmp_path / "paths.json").read_text())["rows"]
    assert [(row["model"], row["isa"]) for row in rows] == [
        (model, isa) for model in ("no cut", "cut 4 of 8, 2-way") for isa in (best, other)
    ]
    assert all(row["num_prompts"] == 10 for row in rows)
    assert ["versus_first" in row for row in rows] == [False, True] * 2
    # Each process had its own answers.
    assert {path.name for path in tmp_path.iterdir() if (path / "answers").is_dir()} == {best, other}
