"""Cuts of a teacher that follows chains: what counts as a right answer, and the report."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kvforge.common.errors import KvforgeError
from kvforge.tasks.chains import HOPS
from perf.harness.engines import TEACHER_DIR
from perf.quality.chains import EXPERIMENT, GROUPS, answers, asked, check_teacher, held_out, plot, shares
from perf.quality.swiftkv_students import Subject
from perf.training.config import CHAINS_DOCUMENTS
from perf.training.documents import TASK_NAMES, Batch

TOLD, FAR = TASK_NAMES.index("chain_0"), TASK_NAMES.index("chain_8")


def test_an_answer_is_right_in_all_of_its_tokens() -> None:
    targets = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 8]])
    task = torch.tensor([[-1, TOLD, TOLD, -1, FAR, FAR, -1, TOLD], [FAR, FAR, -1, TOLD, -1, -1, FAR, FAR]])
    batch = Batch(targets, targets, torch.ones(2, 8), task)
    predicted = targets.clone()
    predicted[0, 0] = 9  # belongs to no answer
    predicted[0, 5] = 9
    predicted[1, 6] = 9
    assert answers(predicted, batch) == {"chain_0": [True, True, True], "chain_8": [False, True, False]}
    assert all(all(values) for values in answers(targets, batch).values())


def test_a_checkpoint_is_asked_every_distance() -> None:
    """The tiny teacher was not trained on chains alone: it knows what is told, less of what is eight links away."""
    subject = Subject(TEACHER_DIR, CHAINS_DOCUMENTS)
    check_teacher(subject)
    right = asked(subject.teacher, held_out(10, subject))
    assert set(right) == {f"chain_{hops}" for hops in HOPS}
    told, far = (sum(right[task]) / len(right[task]) for task in ("chain_0", "chain_8"))
    assert told > 0.5 and far < told


def test_a_teacher_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(KvforgeError, match=r"has no model\.safetensors; train it with .*tiny chains"):
        check_teacher(Subject(tmp_path, CHAINS_DOCUMENTS))


def row(name: str, right: list[int], train: str | None = None, reduction: float = 0.5) -> dict[str, Any]:
    counts = {f"chain_{hops}": 10 for hops in range(9)}
    return {
        "variant": name,
        "cut": 4,
        "train": train,
        "prefill_reduction": reduction,
        "num_answers": counts,
        "right": {task: right for task in counts},
        "kl": [[0.5, 0.01 * seed] for seed in right] if train else [],
    }


def test_the_report_has_means_and_intervals_by_distance(tmp_path: Path) -> None:
    rows = [row("no cut", [10], reduction=0), row("cut 4, no distillation", [2]), row("cut 4", [5, 6, 7], "partial")]
    assert shares(rows[2], GROUPS["all"]) == [0.5, 0.6, 0.7]
    report = {
        "seeds": [1, 2, 3],
        "steps": 50,
        "tokens_per_step": 4096,
        "documents": 96,
        "command": "python -m perf.quality.chains",
        "rows": rows,
    }
    text = EXPERIMENT.show(report)
    assert "(10 told, 20 1–2 links, 30 3–5 links, 30 6–8 links, 90 all;" in text
    assert "| cut 4 | 50.0 | 0.500 to 0.0600 | 60.0 (35.2 to 84.8) |" in text
    assert "| no cut | 0.0 |  | 100.0 |" in text
    plot(report, tmp_path / "chains.png")
    assert (tmp_path / "chains.png").stat().st_size > 10_000
