"""AttentionMass without effects, in the two steps that its kernels are: totals of the queries, then new statistics.

Graphs are traced from these; nothing runs them.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from plugins.operator import NAMESPACE, Operator
from plugins.registration import define_schema

TOTALS, ADD, ADD_SQUARES = (f"attention_mass_{step}_functional" for step in ("totals", "add", "add_squares"))
COMMON = ("q", "k_pool", "query_start", "kv_length", "page_table", "state_table", "skipped")
ADDED = ("totals", *COMMON, "scored", "mass")
SCALES = ("k_scales",)
"""Inputs of the kernels in their order: of totals, of what adds, and behind these of caches with a scale per token."""

OF_ADD = ("scored", "mass", "squares", "kind")
"""Arguments that only the second step takes."""

_TYPES = {"Tensor": "Tensor", "Optional[Tensor]": "Tensor?", "float": "float", "int": "int"}


def define_twins(operator: Operator[..., Any]) -> Callable[[Mapping[str, Any]], tuple[Tensor, ...]]:
    """Declare the operators, and return what calls them with the operator's arguments by name."""
    of_all = [a.name for a in operator.arguments if a.name not in OF_ADD]
    add_squares = ["totals", *(a.name for a in operator.arguments)]
    add = [name for name in add_squares if name != "squares"]
    types = {a.name: _TYPES[str(a.type)] for a in operator.arguments} | {"totals": "Tensor", "squares": "Tensor"}

    def define(twin: str, names: list[str], num_results: int, fake: Callable[[dict[str, Any]], Any]) -> Any:
        parameters = ", ".join(f"{types[name]} {name}" for name in names)
        results = "Tensor" if num_results == 1 else "(Tensor, Tensor)"
        define_schema(twin, f"({parameters}) -> {results}", lambda *given: fake(dict(zip(names, given, strict=True))))
        return getattr(getattr(torch.ops, NAMESPACE), twin)

    calls = {
        TOTALS: define(TOTALS, of_all, 1, lambda g: g["q"].new_empty((*g["q"].shape[:2], 2), dtype=torch.float32)),
        ADD: define(ADD, add, 1, lambda g: torch.empty_like(g["mass"])),
        ADD_SQUARES: define(
            ADD_SQUARES, add_squares, 2, lambda g: (torch.empty_like(g["mass"]), torch.empty_like(g["squares"]))
        ),
    }

    def write(given: Mapping[str, Any]) -> tuple[Tensor, ...]:
        totals = calls[TOTALS](*(given[name] for name in of_all))
        known = {**given, "totals": totals}
        if given["squares"] is None:
            return (calls[ADD](*(known[name] for name in add)),)
        mass, squares = calls[ADD_SQUARES](*(known[name] for name in add_squares))
        return mass, squares

    return write
