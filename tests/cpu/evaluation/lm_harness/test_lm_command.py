"""``kvforge lm-eval`` and the harness' own command on local tasks, and what they refuse."""

import functools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from kvforge.cli import main
from kvforge.common.errors import KvforgeError
from tests.support.models.engines import PLAIN
from tests.support.models.shelf import EngineShelf

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is an extra")
from lm_eval.tasks import TaskManager

from kvforge.evaluation.lm_harness import EngineLM
from kvforge.evaluation.lm_harness import main as harness_main
from tests.support.lm_harness import Reference, byte_ids


def test_local_tasks_through_the_command(
    engines: EngineShelf,
    reference: Reference,
    tasks: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    options = ["--include-path", str(tasks), "--tasks", "local_generate,local_group", "--json"]
    assert main(["lm-eval", str(engines.engine(PLAIN)), *options]) == 0
    scores = {(s["name"], s["metric"]): s for s in json.loads(capsys.readouterr().out)["scores"]}
    assert set(scores) == {
        ("local_generate", "exact_match,none"),
        ("local_choice", "acc,none"),
        ("local_choice", "acc_norm,none"),
        ("local_rolling", "bits_per_byte,none"),
    }
    assert {s["num_samples"] for s in scores.values()} == {8}
    right = 0
    bits = 0.0
    questions = [f"{i} and {i}?" for i in range(8)]
    for i, question in enumerate(questions):
        context = byte_ids(f"Q: {question}\nA:")
        totals = [reference.score(context, byte_ids(f" {option}"))[0] for option in ("one", "two!", "3")]
        right += totals.index(max(totals)) == i % 3
        bits -= reference.score([1], byte_ids(question))[0]
    assert scores["local_choice", "acc,none"]["value"] == right / 8
    rounding = reference.rounding(1) / math.log(2)  # a byte is a token
    expected = bits / sum(len(question) for question in questions) / torch.tensor(2.0).log().item()
    assert scores["local_rolling", "bits_per_byte,none"]["value"] == pytest.approx(expected, abs=rounding)
    assert main(["lm-eval", str(engines.engine(PLAIN)), *options[:2], "--tasks", "local_choice", "--limit", "3"]) == 0
    table = capsys.readouterr().out
    assert table.count("local_choice") == 2 and " 3 " in table


def test_scores_before_a_task_that_fails_are_printed(
    engines: EngineShelf, tasks: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def evaluate(model: EngineLM, tasks: list[str], **options: Any) -> dict[str, Any]:
        if tasks == ["winogrande"]:
            assert options["num_fewshot"] == 5 and options["fewshot_as_multiturn"] is False and options["limit"] == 2
            results = {"winogrande": {"alias": "winogrande", "acc,none": 0.5, "acc_stderr,none": "N/A"}}
            samples = {"winogrande": {"original": 9, "effective": 2}}
            return {"results": results, "n-samples": samples, "n-shot": {"winogrande": 5}, "group_subtasks": {}}
        raise ConnectionError("no such host\nsecond line")

    monkeypatch.setattr("lm_eval.simple_evaluate", evaluate)
    options = ["--include-path", str(tasks), "--tasks", "winogrande,hellaswag", "--limit", "2", "--json"]
    assert main(["lm-eval", str(engines.engine(PLAIN)), *options]) == 1
    captured = capsys.readouterr()
    (score,) = json.loads(captured.out)["scores"]
    assert score == {
        "name": "winogrande",
        "task": "winogrande",
        "num_fewshot": 5,
        "metric": "acc,none",
        "value": 0.5,
        "stderr": None,
        "num_samples": 2,
    }
    assert "the task hellaswag cannot be run (no such host); its data set has to be reachable" in captured.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tasks", "chess-boxing"], "there is no task 'chess-boxing'; choose from arc-challenge, winogrande"),
        (["--tasks", "gsm8k"], "has no chat template, which some of the paper's tasks need"),
        (["--limit", "0"], "--limit is 0; give 1 or more"),
        (["--tasks", ","], "--tasks names no task"),
        (["--include-path", "nowhere"], "--include-path nowhere is not a directory"),
    ],
)
def test_refusals_are_one_sentence(
    engines: EngineShelf, tasks: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lm-eval", str(engines.engine(PLAIN)), "--include-path", str(tasks), *options]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in error


def test_models_that_cannot_be_made_are_refused(engines: EngineShelf, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KvforgeError, match="needs an engine; give --model_args engine=DIR"):
        EngineLM()
    with pytest.raises(KvforgeError, match="max_gen_toks is 0"):
        EngineLM(engines.engine(PLAIN), max_gen_toks=0)
    monkeypatch.setattr("kvforge.runtime.LLM.tokenizer", None)
    with pytest.raises(KvforgeError, match="no tokenizer"):
        EngineLM(engines.engine(PLAIN))


def test_the_harness_has_its_own_command(
    engines: EngineShelf, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    # Its own tasks, which take seconds to read, are those of test_lm_presets.py.
    monkeypatch.setattr("lm_eval.tasks.TaskManager", functools.partial(TaskManager, include_defaults=False))
    options = ["run", "--model", "kvforge", "--include_path", str(tasks), "--tasks", "local_generate", "--limit", "2"]
    monkeypatch.setattr("sys.argv", ["lm_eval", *options, "--model_args", f"engine={engines.engine(PLAIN)}"])
    assert harness_main() == 0
    assert re.search(r"\|local_generate\|.*\|exact_match\|", capsys.readouterr().out)
    monkeypatch.setattr("sys.argv", ["lm_eval", *options, "--model_args", "engine=absent"])
    assert harness_main() == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("kvforge: error: absent is not an engine directory")
