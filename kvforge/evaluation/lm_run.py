"""Tasks of lm-evaluation-harness on an engine, the paper's seven preconfigured."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvforge.common.errors import KvforgeError, first_line
from kvforge.common.extras import import_failed
from kvforge.evaluation.lm_tasks import MAX_ANSWER_TOKENS, PAPER_TASKS, PaperTask

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager


@dataclass(frozen=True)
class LmScore:
    """One metric of one task. ``stderr`` is lm-evaluation-harness's standard error, None where it has none;
    ``num_samples`` the documents of all its subtasks."""

    name: str
    task: str
    num_fewshot: int | None
    metric: str
    value: float
    stderr: float | None
    num_samples: int


def run_paper_tasks(
    engine: Path,
    tasks: Sequence[str] | None = None,
    limit: int | None = None,
    include_path: Path | None = None,
    show_progress: bool | None = None,
) -> Iterator[LmScore]:
    """Run tasks on an engine, one after the other, and yield the scores of each when it is done.

    Args:
        engine: engine directory.
        tasks: names of PAPER_TASKS, run as the paper runs them, or of any task of lm-evaluation-harness, run as it is
            defined there; None for the paper's seven.
        limit: documents of each (sub)task at most.
        include_path: directory with task definitions of one's own.
        show_progress: draw bars; None: on a terminal.

    Yields:
        A score for each of the paper's tasks, and one for every metric of each other task.

    Raises:
        MissingToolError: lm-evaluation-harness is not installed or cannot be imported.
        KvforgeError: a task is unknown, its data set cannot be loaded, or the engine cannot run it.
    """
    try:
        from lm_eval import simple_evaluate

        from kvforge.evaluation.lm_harness import EngineLM
    except Exception as error:  # of packages that do not fit each other, anything
        raise import_failed("kvforge lm-eval needs lm-evaluation-harness", "eval", error) from None
    presets = {preset.name: preset for preset in PAPER_TASKS}
    chosen = list(presets) if tasks is None else list(tasks)
    model = EngineLM(engine, max_gen_toks=MAX_ANSWER_TOKENS, show_progress=show_progress)
    if model.template is None and any(presets[name].apply_chat_template for name in chosen if name in presets):
        raise KvforgeError(
            f"{engine} has no chat template, which some of the paper's tasks need; choose others with --tasks, or "
            "build it from a checkpoint with chat_template.jinja."
        )
    manager = task_manager(include_path)
    unknown = [name for name in chosen if name not in presets and name not in manager.all_tasks]
    if unknown:
        raise KvforgeError(
            f"there is no task {unknown[0]!r}; choose from {', '.join(presets)}, or one that lm-eval ls tasks shows."
        )
    common = {"limit": limit, "task_manager": manager, "bootstrap_iters": 1000, "log_samples": False}
    for name in chosen:
        preset = presets.get(name)
        options = {} if preset is None else _options(preset)
        task = name if preset is None else preset.task
        try:
            results = simple_evaluate(model, tasks=[task], **common, **options)
        except KvforgeError:
            raise
        except Exception as error:  # what data sets, their servers and task definitions raise
            raise KvforgeError(
                f"the task {task} cannot be run ({first_line(error)}); its data set has to be reachable or in the "
                "cache of Hugging Face datasets."
            ) from error
        yield from _scores(name, task, results, preset)


@functools.cache
def task_manager(include_path: Path | None = None) -> "TaskManager":
    """Return lm-evaluation-harness's list of tasks, which takes seconds to read, with those of a folder."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=None if include_path is None else str(include_path))


def _options(preset: PaperTask) -> dict[str, Any]:
    return {
        "num_fewshot": preset.num_fewshot,
        "apply_chat_template": preset.apply_chat_template,
        "fewshot_as_multiturn": preset.fewshot_as_multiturn,
    }


def _scores(name: str, task: str, results: dict[str, Any], preset: PaperTask | None) -> list[LmScore]:
    """Return the metrics of ``task`` itself; a group that does not add its subtasks up gives theirs."""
    rows = results["results"]
    found = [task] if any("," in key for key in rows.get(task, {})) else [row for row in rows if row != task]
    samples = results["n-samples"]
    scores = []
    for row in found:
        parts = _subtasks(row, results.get("group_subtasks", {}))
        num_samples = sum(samples[part]["effective"] for part in parts if part in samples)
        shots = {results["n-shot"].get(part) for part in parts}
        for key, value in rows[row].items():
            metric, _, kind = key.partition(",")
            if not kind or metric.endswith("_stderr") or (preset is not None and key != preset.metric):
                continue
            stderr = rows[row].get(f"{metric}_stderr,{kind}")
            scores.append(
                LmScore(
                    name if row == task else row,
                    row,
                    next(iter(shots)) if len(shots) == 1 else None,
                    key,
                    float(value),
                    stderr if isinstance(stderr, float) else None,
                    num_samples,
                )
            )
    if preset is not None and not scores:
        raise KvforgeError(f"the task {task} has no metric {preset.metric}; use a version of lm-eval that has it.")
    return scores


def _subtasks(task: str, groups: dict[str, list[str]]) -> list[str]:
    """Return the tasks that ``task`` stands for: itself, or all below a group."""
    if not groups.get(task):
        return [task]
    return [leaf for part in groups[task] for leaf in _subtasks(part, groups)]


def score_table(scores: Sequence[LmScore]) -> str:
    """Return a text table, one row per score."""
    width = max([4, *(len(score.name) for score in scores)]) + 2
    lines = [f"{'task':<{width}}{'metric':<28}{'shots':>6}{'samples':>9}{'value':>12}{'std. error':>12}"]
    for s in scores:
        shots = "" if s.num_fewshot is None else str(s.num_fewshot)
        stderr = "" if s.stderr is None else f"{s.stderr:.4f}"
        lines.append(f"{s.name:<{width}}{s.metric:<28}{shots:>6}{s.num_samples:>9}{s.value:>12.4f}{stderr:>12}")
    return "\n".join(lines)
