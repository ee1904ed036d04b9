"""Synthetic text tasks with checkable answers: pure Python, seeded, no torch."""

from kvforge.tasks import amounts, arithmetic, list_recall, needle, quoting, variables
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
    )
}

__all__ = ["TASKS", "Item", "Task"]
