"""Checkpoints with one thing wrong: every command refuses them in one sentence, or an engine of them generates, and a
process with little memory is enough."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.models.checkpoints import ALL_FAMILIES, make_checkpoint

ROOT = Path(__file__).resolve().parents[3]
TINY = {"num_hidden_layers": 3, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "head_dim": 8}


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_every_mutation_is_refused_or_generates(family: str, tmp_path: Path, full: bool) -> None:
    checkpoint = make_checkpoint(tmp_path / family, family, num_key_value_heads=1, **TINY)
    count, seed = 1000 if full else 208 // len(ALL_FAMILIES), list(ALL_FAMILIES).index(family)
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.hostile.checkpoint_attack", str(checkpoint), str(seed), str(count)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=3000,
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == count, done.stderr[-2000:]  # a crash says at which mutation
    refused = 0
    for row in rows:
        for reader, answer in row["found"].items():
            sentence = not answer or (answer.endswith(".") and "\n" not in answer and len(answer) < 800)
            assert sentence and not answer.startswith("FAILED"), (row["number"], row["what"], reader, answer[:500])
        built, generated = row["found"]["build"], row["found"]["generate"]
        refused += bool(built)
        if not built and generated:
            assert "logits are not finite" in generated and row["what"].startswith("weights: value"), row
    assert count * 0.3 < refused < count * 0.95
