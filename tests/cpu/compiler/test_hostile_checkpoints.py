"""Checkpoints with one thing wrong: every command refuses them in one sentence, or an engine of them generates, and a
process with little memory is enough."""

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.models.checkpoints import ALL_FAMILIES, make_checkpoint
from tests.support.random_cases import Seeds

ROOT = Path(__file__).resolve().parents[3]
TINY = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "head_dim": 8}


class Attacker:
    """One process for all families: torch and its export are imported once. After a crash another one is started."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process: subprocess.Popen[str] | None = None

    def attack(self, checkpoint: Path, seed: int, numbers: list[int]) -> list[dict[str, Any]]:
        """Return what the process prints of each mutation: fewer than ``numbers`` after a crash."""
        if self._process is None:
            self._process = self._start()
        assert self._process.stdin is not None and self._process.stdout is not None
        rows: list[dict[str, Any]] = []
        try:
            self._process.stdin.write(shlex.join([str(checkpoint), str(seed), *map(str, numbers)]) + "\n")
            self._process.stdin.flush()
            while len(rows) < len(numbers) and (line := self._process.stdout.readline()):
                rows.append(json.loads(line))
        finally:
            if len(rows) < len(numbers):  # the next family gets no rows of this one
                self.end()
        return rows

    def said(self) -> str:
        """Its standard error so far."""
        return self._log.read_text(errors="replace")

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _start(self) -> "subprocess.Popen[str]":
        command, pipe = [sys.executable, "-m", "tests.support.hostile.checkpoint_attack"], subprocess.PIPE
        with self._log.open("w") as log:
            return subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=log, text=True)


@pytest.fixture(scope="module")
def attacker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacker]:
    attacker = Attacker(tmp_path_factory.mktemp("attacker") / "said.txt")
    yield attacker
    attacker.end()


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_every_mutation_is_refused_or_generates(family: str, attacker: Attacker, tmp_path: Path, seeds: Seeds) -> None:
    checkpoint = make_checkpoint(tmp_path / family, family, num_key_value_heads=1, **TINY)
    numbers, seed = seeds(208 // len(ALL_FAMILIES), 1000), list(ALL_FAMILIES).index(family)
    rows = attacker.attack(checkpoint, seed, numbers)
    assert [row["number"] for row in rows] == numbers, attacker.said()[-2000:]  # a crash says at which mutation
    refused = 0
    for row in rows:
        for reader, answer in row["found"].items():
            sentence = not answer or (answer.endswith(".") and "\n" not in answer and len(answer) < 800)
            assert sentence and not answer.startswith("FAILED"), (row["number"], row["what"], reader, answer[:500])
        built, generated = row["found"]["build"], row["found"]["generate"]
        refused += bool(built)
        if not built and generated:
            assert "logits are not finite" in generated and row["what"].startswith("weights: value"), row
    assert len(numbers) < 1000 or 300 < refused <= 950  # of few cases all may be refused, or none
