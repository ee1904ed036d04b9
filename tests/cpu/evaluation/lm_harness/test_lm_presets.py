"""The paper's tasks among those of the installed lm-evaluation-harness."""

from pathlib import Path
from typing import Any

import pytest

from kvforge.evaluation.lm_tasks import PAPER_TASKS

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is an extra")
from lm_eval.tasks import TaskManager

from kvforge.evaluation.lm_run import task_manager


@pytest.fixture(scope="module")
def manager(tasks: Path) -> TaskManager:
    return task_manager(tasks)


def configurations(manager: TaskManager, name: str) -> list[dict[str, Any]]:
    """The definitions of a task, or of all tasks below a group or tag."""
    entry = manager.task_index[name]
    config = entry.cfg or {}
    parts = config.get("task") if entry.kind.name == "GROUP" else None
    if entry.kind.name == "TAG":
        parts = [task for task, e in manager.task_index.items() if name in e.tags]
    if parts is None:
        return [config]
    return [leaf for part in parts for leaf in configurations(manager, part)]


@pytest.mark.parametrize("preset", PAPER_TASKS, ids=lambda preset: preset.name)
def test_presets_are_tasks_of_the_installed_harness(manager: TaskManager, preset) -> None:
    """Their definitions have the metric, examples where the preset asks for some, and turns that end."""
    leaves = configurations(manager, preset.task)
    assert len(leaves) == (57 if preset.name.startswith("mmlu") else 1)
    metric, filtered = preset.metric.split(",")
    for leaf in leaves:
        assert metric in [entry["metric"] for entry in leaf["metric_list"]]
        filters = [entry["name"] for entry in leaf.get("filter_list", [{"name": "none"}])]
        assert filtered in filters
        if preset.num_fewshot:
            splits = (leaf.get("fewshot_split"), leaf.get("training_split"), leaf.get("validation_split"))
            assert any(splits) or "samples" in leaf.get("fewshot_config", {})
        assert preset.apply_chat_template == (leaf["output_type"] == "generate_until")
        assert preset.apply_chat_template or not preset.fewshot_as_multiturn


def test_presets_are_the_papers() -> None:
    shots = {preset.name: preset.num_fewshot for preset in PAPER_TASKS}
    assert shots == {
        "arc-challenge": 0,
        "winogrande": 5,
        "hellaswag": 10,
        "truthfulqa": 0,
        "mmlu": 5,
        "mmlu-cot": 0,
        "gsm8k": 8,
    }
