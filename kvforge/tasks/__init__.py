"""Synthetic text tasks with checkable answers: pure Python, seeded, no torch."""

from kvforge.tasks import (
    amounts,
    arithmetic,
    chains,
    common_words,
    list_recall,
    needle,
    needle_values,
    questions,
    quoting,
    variables,
)
from kvforge.tasks.item import Item, Task

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        needle.SINGLE,
        needle.MULTI,
        variables.TASK,
        quoting.TASK,
        list_recall.TASK,
        arithmetic.TASK,
        amounts.TASK,
        needle_values.VALUES,
        needle_values.QUERIES,
        common_words.TASK,
        questions.SINGLE,
        questions.TWO_HOP,
        *chains.TASKS,
    )
}
DEFAULT_TASKS = tuple(task.name for task in TASKS.values() if task.is_default)
"""Those that an evaluation runs unless it is told which."""

__all__ = ["DEFAULT_TASKS", "TASKS", "Item", "Task"]
