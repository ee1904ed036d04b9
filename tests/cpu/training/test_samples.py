"""Files to try `rewire`, `distill` and `eval` with: made by the tasks, fit for the tiny teacher as the README says."""

import json
import re
import shlex
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from kvforge.cli import main
from perf.training.samples import HELD_OUT, TEXT, TRAIN, make_samples

ROOT = Path(__file__).resolve().parents[3]
ASSETS = ROOT / "model_defs" / "assets"
SAMPLES, TEACHER = ASSETS / "samples", ASSETS / "tiny-teacher"


def trial() -> list[str]:
    """The lines of the README that begin with these commands, in order."""
    text = re.sub(r"\\\n +", "", (ROOT / "README.md").read_text())
    lines = re.findall(r"^    kvforge (.*?)(?: +#.*)?$", text, re.MULTILINE)
    wanted = ("build CHECKPOINT", "rewire", "distill", "build checkpoints/student", "eval engines/student")
    return [next(line for line in lines if line.startswith(begin)) for begin in wanted]


def arguments(line: str, folder: Path) -> list[str]:
    words = [word.replace("DATA/", f"{SAMPLES}/") for word in shlex.split(line)]
    words = [str(TEACHER) if word == "CHECKPOINT" else word for word in words]
    return [str(folder / word) if word.startswith(("checkpoints/", "engines/")) else word for word in words]


def test_the_samples_are_what_the_tasks_make() -> None:
    tokenizer = Tokenizer.from_file(str(TEACHER / "tokenizer.json"))
    for name, content in make_samples(tokenizer).items():
        assert (SAMPLES / name).read_text(encoding="utf-8") == content
    prompts = [json.loads(line)["prompt"] for line in (SAMPLES / TRAIN).read_text().splitlines()]
    texts = [(SAMPLES / name).read_text().split("\n\n") for name in (TEXT, HELD_OUT)]
    assert not set(texts[0]) & set(texts[1])
    assert not any(text.startswith(prompt) for text in [*texts[0], *texts[1]] for prompt in prompts)


def test_a_shorter_trial(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, rewire, distill, _, _ = trial()
    assert main(arguments(rewire, tmp_path)) == 0
    assert main([*arguments(distill, tmp_path), "--max-steps", "1", "--batch-size", "1", "--json"]) == 0
    assert (tmp_path / "checkpoints" / "student" / "model.safetensors").is_file()


def test_the_trial_of_the_readme(tmp_path: Path, capsys: pytest.CaptureFixture[str], full: bool) -> None:
    if not full:
        pytest.skip("distils for half a minute and builds two engines; --full")
    for line in trial()[:-1]:
        assert main(arguments(line, tmp_path)) == 0
    capsys.readouterr()
    assert main([*arguments(trial()[-1], tmp_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    documents = report["documents"]
    assert documents["kl"]["value"] < 0.3  # 0.66 before the trial
    assert max(documents["teacher_perplexity"]["value"], documents["perplexity"]["value"]) < 20
