"""Questions of public benchmarks, from what repositories hold of them, in the columns of the harness's data sets.

Each function returns the rows of a task of lm-evaluation-harness.
"""

import bz2
import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvforge.common.errors import KvforgeError

Rows = list[dict[str, Any]]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8").splitlines():
        yield json.loads(line)


def arc_challenge(path: Path) -> Rows:
    """The file has a line for each choice, those of a question one after the other."""
    choices: dict[str, list[tuple[str, int]]] = {}
    for line in _lines(path):
        choices.setdefault(line["question"], []).append((line["answer"], line["label"]))
    rows = []
    for question, own in choices.items():
        right = [label for _, label in own]
        if right.count(1) == 1:
            labels = [chr(ord("A") + index) for index in range(len(own))]
            given = {"text": [text for text, _ in own], "label": labels}
            rows.append({"question": question, "choices": given, "answerKey": labels[right.index(1)]})
    return rows


def openbookqa(path: Path) -> Rows:
    """One line a question."""
    return [
        {
            "question_stem": line["question"]["stem"],
            "choices": {part: [choice[part] for choice in line["question"]["choices"]] for part in ("text", "label")},
            "answerKey": line["answerKey"],
        }
        for line in _lines(path)
    ]


def piqa(path: Path) -> Rows:
    """One line a question, with the words that the harness puts before it."""
    return [
        {
            "goal": line["query"].removeprefix("Question: "),
            "sol1": line["choices"][0],
            "sol2": line["choices"][1],
            "label": line["gold"],
        }
        for line in _lines(path)
    ]


def truthfulqa_mc2(path: Path) -> Rows:
    """The authors' table: right and wrong answers of a question, between semicolons."""
    rows = []
    with path.open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            right, wrong = (
                [answer.strip() for answer in line[name].split(";") if answer.strip()]
                for name in ("Correct Answers", "Incorrect Answers")
            )
            targets = {"choices": right + wrong, "labels": [1] * len(right) + [0] * len(wrong)}
            rows.append({"question": line["Question"], "mc1_targets": targets, "mc2_targets": targets})
    return rows


def hellaswag(path: Path) -> Rows:
    """Six lines a question: activity and context, the right ending's number, four endings. What follows the last whole
    sentence of the context is the beginning of the endings."""
    lines = bz2.decompress(path.read_bytes()).decode().splitlines()
    rows = []
    for head, label, *endings in zip(*[iter(lines)] * 6, strict=True):
        activity, _, context = head.partition(": ")
        begun = re.search(r"(?<=[.!?] )[^.!?]+$", context)
        parts = (context[: begun.start()].strip(), begun[0]) if begun else (context, "")
        rows.append(
            {"activity_label": activity, "ctx_a": parts[0], "ctx_b": parts[1], "label": label, "endings": endings}
        )
    return rows


def winogrande(path: Path) -> Rows:
    """Instructions that end in a sentence with a gap and two options, and which one is right."""
    rows = []
    for line in json.loads(path.read_text(encoding="utf-8")):
        found = re.search(r": (.*?)\s+Option1: (.*?) Option2: (.*?) Answer format", line["instruction"], re.DOTALL)
        if found and found[1].count("_") == 1:
            parts = dict(zip(("sentence", "option1", "option2"), found.groups(), strict=True))
            rows.append({**parts, "answer": line["answer"].removeprefix("option")})
    return rows


def gsm8k(path: Path) -> Rows:
    """The authors' file: one line a problem."""
    return list(_lines(path))


def mmlu(path: Path) -> Rows:
    """A subject's table, below a head: question, four choices, the right one's number."""
    with path.open(encoding="utf-8", newline="") as file:
        return [
            {"question": line[0], "choices": line[1:5], "answer": int(line[5]), "subject": _subject(path)}
            for line in list(csv.reader(file))[1:]
        ]


def _subject(path: Path) -> str:
    return path.stem.rsplit("_", 1)[0]


GSM8K = "grade-school-math/grade_school_math/data"
EXAMPLES = {"gsm8k": f"{GSM8K}/train.jsonl"}
"""Benchmark to the file of which five rows are examples before each question."""
FILES: Mapping[str, tuple[str, Callable[[Path], Rows], str, str]] = {
    "arc_challenge": ("RepE-Replication/data/arc_challenge.jsonl", arc_challenge, "arc/arc_challenge.yaml", "acc_norm"),
    "openbookqa": (
        "truthfulqa_experiments/datasets/openbookqa.jsonl", openbookqa, "openbookqa/openbookqa.yaml", "acc_norm",
    ),
    "piqa": ("llm-eval/data/piqa.jsonl", piqa, "piqa/piqa.yaml", "acc_norm"),
    "truthfulqa_mc2": (
        "truthfulqa_experiments/datasets/TruthfulQA.csv", truthfulqa_mc2, "truthfulqa/truthfulqa_mc2.yaml", "acc",
    ),
    "hellaswag": ("hellaswag_text_data/hellaswag_val_full.txt.bz2", hellaswag, "hellaswag/hellaswag.yaml", "acc_norm"),
    "winogrande": ("FedLS/dataset/winogrande/test.json", winogrande, "winogrande/default.yaml", "acc"),
    "gsm8k": (f"{GSM8K}/test.jsonl", gsm8k, "gsm8k/gsm8k.yaml", "exact_match,flexible-extract"),
}  # fmt: skip
"""Benchmark to its file, what reads it, the harness's definition, and its metric (and filter)."""
MMLU = "MLILAB-FedLLM/data/mmlu"


def write_task(name: str, definition: str, rows: dict[str, Rows], folder: Path) -> str:
    """Write the ``rows`` of each split to ``folder``, and beside them the harness's ``definition`` with these for data;
    returns the task's name."""
    import lm_eval

    files = {}
    for split, own in rows.items():
        files[split] = str(folder / f"{name}-{split}.jsonl")
        Path(files[split]).write_text("".join(json.dumps(row) + "\n" for row in own), encoding="utf-8")
    task = {
        "include": str(Path(lm_eval.__file__).parent / "tasks" / definition), "task": f"local_{name}", "tag": None,
        "dataset_path": "json", "dataset_name": None, "dataset_kwargs": {"data_files": files}, "training_split": None,
        "validation_split": None, "test_split": "test", "fewshot_split": "dev" if "dev" in rows else None,
        "num_fewshot": 5 if "dev" in rows else 0,
    }  # fmt: skip
    (folder / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML
    return f"local_{name}"


def task_definitions(sources: Path, folder: Path, limit: int) -> dict[str, tuple[list[str], str]]:
    """Write what ``sources`` holds of each benchmark to ``folder``, ``limit`` questions of each at most, as tasks.

    Returns their names and metrics. MMLU's are spread over its subjects, with five examples before each.

    Raises KvforgeError where there is none.
    """
    found: dict[str, tuple[list[str], str]] = {}
    for name, (file, read, definition, metric) in FILES.items():
        if (sources / file).is_file():
            rows = {"test": read(sources / file)[:limit]}
            if name in EXAMPLES:
                rows["dev"] = read(sources / EXAMPLES[name])
            found[name] = [write_task(name, definition, rows, folder)], metric
    tests = sorted((sources / MMLU / "test").glob("*_test.csv"))
    if tests:
        each = -(-limit // len(tests))
        found["mmlu"] = [_mmlu_task(test, each, folder) for test in tests], "acc"
    if not found:
        raise KvforgeError(f"{sources} has none of {', '.join(file for file, *_ in FILES.values())}, {MMLU}.")
    return found


def _mmlu_task(test: Path, limit: int, folder: Path) -> str:
    subject = _subject(test)
    rows = {"test": mmlu(test)[:limit], "dev": mmlu(test.parents[1] / "dev" / f"{subject}_dev.csv")}
    return write_task(f"mmlu_{subject}", f"mmlu/default/mmlu_{subject}.yaml", rows, folder)
