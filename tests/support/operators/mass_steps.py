"""Calls of attention_mass about one sequence, whole and in steps, whose statistics have the same bits."""

from collections.abc import Callable
from typing import Any

import torch

import plugins
from plugins.attention_mass.cases import random_case
from tests.support.operators.cases import fresh

NAME = "attention_mass"
NAMES = tuple(argument.name for argument in plugins.OPERATORS[NAME].arguments)


def by_name(seed: int, **chosen: Any) -> dict[str, Any]:
    """A random case's arguments by name."""
    return dict(zip(NAMES, random_case(seed, **chosen), strict=True))


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    """Whether all bits are equal."""
    return all(torch.equal(x.view(torch.int32), y.view(torch.int32)) for x, y in zip(ours, theirs, strict=True))


def alone(args: dict[str, Any], s: int) -> dict[str, Any]:
    """The arguments about sequence s only."""
    begin, end = args["query_start"][s : s + 2].tolist()
    rows = ("kv_length", "page_table", "state_table", "skipped", "scored")
    start = torch.tensor([0, end - begin], dtype=torch.int32)
    return args | {"q": args["q"][begin:end], "query_start": start} | {name: args[name][s : s + 1] for name in rows}


def splittable(args: dict[str, Any]) -> list[dict[str, Any]]:
    """Each sequence of three queries or more, of whose slots of this step none has statistics before it."""
    parts = [alone(args, s) for s in range(len(args["kv_length"]))]
    return [part for part in parts if len(part["q"]) > 2 and part["scored"] <= part["kv_length"] - len(part["q"])]


def in_steps(args: dict[str, Any], lengths: list[int], function: Callable[..., Any]) -> list[torch.Tensor]:
    """What `function` writes for the one sequence of `args` when its queries come in steps of these lengths."""
    args = dict(zip(NAMES, fresh(NAME, tuple(args.values())), strict=True))
    past, skipped, scored, done = int(args["kv_length"][0]) - len(args["q"]), int(args["skipped"][0]), args["scored"], 0
    for count in lengths:
        end = done + count
        ints = {"query_start": [0, count], "kv_length": [past + end], "skipped": [max(0, skipped - done)]}
        step = {name: torch.tensor(value, dtype=torch.int32) for name, value in ints.items()}
        function(**args | step | {"q": args["q"][done:end], "scored": scored})
        if end > skipped:  # slots up to here have statistics now
            scored = step["kv_length"]
        done = end
    return [args[name] for name in ("mass", "squares") if args[name] is not None]
