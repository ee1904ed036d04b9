"""Benchmarks from local files: rows in the harness's columns, its own tasks on them, and differences in pairs."""

import bz2
import csv
import json
from pathlib import Path

import pytest

from kvforge.common.errors import KvforgeError
from perf.real_model import tasks
from perf.real_model.task_files import (
    EXAMPLES,
    FILES,
    MMLU,
    arc_challenge,
    hellaswag,
    mmlu,
    openbookqa,
    piqa,
    task_definitions,
    winogrande,
)
from tests.support.models.engines import SWIFTKV


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A question of each benchmark or two, as the repositories hold them."""

    def lines(name: str, *rows: dict) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    def table(name: str, *rows: list[str]) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        with (tmp_path / name).open("w", newline="") as file:
            csv.writer(file).writerows(rows)

    lines(
        FILES["arc_challenge"][0],
        *({"question": "What is wet?", "answer": text, "label": int(text == "rain")} for text in ("sand", "rain")),
        *(
            {"question": "What is hot?", "answer": text, "label": int(text == "fire")}
            for text in ("fire", "ice", "fog")
        ),
        {"question": "Nothing is right.", "answer": "no", "label": 0},
    )
    choices = [{"text": "a fox", "label": "A"}, {"text": "a coin", "label": "B"}]
    lines(FILES["openbookqa"][0], {"question": {"stem": "An animal is", "choices": choices}, "answerKey": "A"})
    lines(FILES["piqa"][0], {"query": "Question: open it", "choices": ["pull", "sing"], "gold": 0})
    table(
        FILES["truthfulqa_mc2"][0],
        ["Type", "Question", "Correct Answers", "Incorrect Answers"],
        ["Adversarial", "Is it?", "It is; Yes, it is", "It is not; ; Never"],
    )
    swag = tmp_path / FILES["hellaswag"][0]
    swag.parent.mkdir()
    contexts = ("Roof work: A man sits. He is old. the man", "Care: How to rest. Lie down. Now sleep.")
    swag.write_bytes(bz2.compress("".join(f"{context}\n1\na\nb\nc\nd\n" for context in contexts).encode()))
    gap = "Choose: Sarah beat Ann so _ won: {}.\n\nOption1: Sarah Option2: Ann Answer format: option1/option2"
    wino = tmp_path / FILES["winogrande"][0]
    wino.parent.mkdir(parents=True)
    wino.write_text(json.dumps([{"instruction": gap.format("a cup"), "answer": "option1"}]))
    lines(FILES["gsm8k"][0], {"question": "What is 2 + 3?", "answer": "It is <<2+3=5>>5.\n#### 5"})
    lines(EXAMPLES["gsm8k"], *({"question": f"What is {i} + 1?", "answer": f"#### {i + 1}"} for i in range(6)))
    for subject in ("anatomy", "astronomy"):
        head = ["question", "choice0", "choice1", "choice2", "choice3", "answer"]
        table(f"{MMLU}/test/{subject}_test.csv", head, ["Which one?", "a", "b", "c", "d", "2"], ["And?", *"efgh", "0"])
        table(f"{MMLU}/dev/{subject}_dev.csv", head, *([f"Example {i}?", *"abcd", "1"] for i in range(5)))
    return tmp_path


def test_rows_have_the_harness_columns(sources: Path) -> None:
    first, second = arc_challenge(sources / FILES["arc_challenge"][0])
    assert first == {
        "question": "What is wet?",
        "choices": {"text": ["sand", "rain"], "label": ["A", "B"]},
        "answerKey": "B",
    }
    assert second["answerKey"] == "A" and len(second["choices"]["text"]) == 3
    (row,) = openbookqa(sources / FILES["openbookqa"][0])
    assert row["question_stem"] == "An animal is" and row["choices"]["text"] == ["a fox", "a coin"]
    assert piqa(sources / FILES["piqa"][0]) == [{"goal": "open it", "sol1": "pull", "sol2": "sing", "label": 0}]
    swag = hellaswag(sources / FILES["hellaswag"][0])
    assert [(row["activity_label"], row["ctx_a"], row["ctx_b"]) for row in swag] == [
        ("Roof work", "A man sits. He is old.", "the man"),
        ("Care", "How to rest. Lie down. Now sleep.", ""),
    ]
    assert swag[0]["label"] == "1" and swag[0]["endings"] == list("abcd")
    (row,) = winogrande(sources / FILES["winogrande"][0])
    assert row == {"sentence": "Sarah beat Ann so _ won: a cup.", "option1": "Sarah", "option2": "Ann", "answer": "1"}
    found = mmlu(sources / MMLU / "test" / "anatomy_test.csv")
    assert [row["answer"] for row in found] == [2, 0] and found[0]["subject"] == "anatomy"


def test_the_harness_runs_its_own_tasks_on_them(sources: Path, engines, tmp_path: Path) -> None:
    """Every question has a score, of the parts of a benchmark in order; an engine differs from itself by nothing."""
    from kvforge.evaluation.lm_harness import EngineLM

    folder = tmp_path / "tasks"
    folder.mkdir()
    chosen = task_definitions(sources, folder, limit=2)
    assert [len(parts) for parts, _ in chosen.values()] == [1, 1, 1, 1, 1, 1, 1, 2]
    model = EngineLM(engines.engine(SWIFTKV), show_progress=False)
    scores = tasks.scores_of(model, chosen, tasks.task_manager(folder))
    assert {name: len(own) for name, own in scores.items()} == {
        "arc_challenge": 2, "openbookqa": 1, "piqa": 1, "truthfulqa_mc2": 1, "hellaswag": 2, "winogrande": 1,
        "gsm8k": 1, "mmlu": 2,
    }  # fmt: skip
    assert all(0 <= score <= 1 for own in scores.values() for score in own)
    assert 0 < scores["truthfulqa_mc2"][0] < 1  # a share of the probability, not a count
    several = {name: own for name, own in scores.items() if len(own) > 1}
    rows = tasks.rows_of("itself", several, several)
    assert [row["more"]["value"] for row in rows] == [0] * 3 and [row["same"] for row in rows] == [1] * 3


def test_problems_are_scored_by_the_last_number(sources: Path, tmp_path: Path) -> None:
    """Behind five examples, each question once, though the harness scores it by two filters."""
    from lm_eval.api.model import LM

    class Answers(LM):
        prompts: tuple[str, ...] = ()

        def generate_until(self, requests):
            self.prompts += tuple(request.args[0] for request in requests)
            return ["It has 3 and 2, so 5."] * len(requests)

        def loglikelihood(self, requests):
            raise NotImplementedError

        loglikelihood_rolling = loglikelihood

    folder = tmp_path / "tasks"
    folder.mkdir()
    chosen = {"gsm8k": task_definitions(sources, folder, limit=2)["gsm8k"]}
    model = Answers()
    assert tasks.scores_of(model, chosen, tasks.task_manager(folder)) == {"gsm8k": [1.0]}
    (prompt,) = model.prompts
    assert prompt.count("####") == 5 and prompt.endswith("Question: What is 2 + 3?\nAnswer:")


def test_differences_are_of_pairs_and_tables_show_them() -> None:
    model, engine = {"piqa": [1.0, 0.0, 1.0, 1.0]}, {"piqa": [1.0, 1.0, 0.0, 0.0]}
    rows = tasks.rows_of(tasks.MODEL, model, model) + tasks.rows_of("int4", engine, model)
    assert rows[1]["score"]["value"] == 0.5 and rows[1]["more"]["value"] == -0.25 and rows[1]["same"] == 0.25
    text = tasks.markdown({"command": "c", "date": "d", "machine": "m", "rows": rows})
    assert "piqa (4)" in text and text.count("| int4 | ") == 2 and text.count(f"| {tasks.MODEL} |") == 1


def test_sources_without_a_benchmark_are_refused(tmp_path: Path) -> None:
    with pytest.raises(KvforgeError, match=r"has none of RepE-Replication"):
        task_definitions(tmp_path, tmp_path, 1)
