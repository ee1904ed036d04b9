"""A name that is no checkpoint is refused before torch is imported, which takes seconds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.serving.serve_process import FREE_PORTS

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import sys
from kvforge.cli import main
code = main(sys.argv[1:])
sys.exit("torch is imported" if "torch" in sys.modules else code)
"""
ON_HUB = "nosuch/model is not a path here, and not all of it is in "
NO_CHECKPOINT = "/no/such does not exist: give a directory with config.json and *.safetensors, a GGUF file, or "
NO_ENGINE = "/no/such is not an engine directory (there is nothing of this name); give an engine, a checkpoint, or "


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (["build", "nosuch/model", "-o", "OUTPUT"], ON_HUB),
        (["build", "/no/such", "-o", "OUTPUT"], NO_CHECKPOINT),
        (["quantize", "/no/such", "-o", "OUTPUT", "--recipe", "int4"], NO_CHECKPOINT),
        (["serve", "nosuch/model", *FREE_PORTS], ON_HUB),
        (["serve", "/no/such", *FREE_PORTS], NO_ENGINE),
    ],
)
def test_a_name_that_is_none_is_refused_before_torch_is_imported(command, sentence, tmp_path: Path) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path)}
    arguments = [str(tmp_path / word) if word == "OUTPUT" else word for word in command]
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 1 and not (tmp_path / "OUTPUT").exists()
    assert ended.stderr.startswith(f"kvforge: error: {sentence}") and ended.stderr.count("\n") == 1
