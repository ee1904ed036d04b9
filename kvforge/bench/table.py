"""The table of ``kvforge bench``, whose rows appear one by one."""

import dataclasses
from typing import Any

from kvforge.bench.workload import Workload

Column = tuple[str, str, int, str]
"""Key of the result, title, width (negative: aligned to the left) and format of a column."""

_WORKLOAD: tuple[Column, ...] = (
    ("name", "workload", -20, ""),
    ("requests", "requests", 8, ""),
    ("input_tokens", "input", 7, ""),
    ("output_tokens", "output", 7, ""),
    ("ttft_s", "TTFT s", 9, ".3f"),
    ("total_s", "total s", 9, ".3f"),
    ("prompt_tok_s", "prompt tok/s", 13, ".1f"),
    ("decode_tok_s", "decode tok/s", 13, ".1f"),
    ("token_ms", "ms/token", 9, ".2f"),
    ("combined_tok_s", "combined tok/s", 15, ".1f"),
)
_DRAFTS: tuple[Column, ...] = (
    ("draft_tokens", "draft tokens", 13, ""),
    ("acceptance", "accepted", 9, ".1%"),
    ("mean_accepted_length", "per draft", 10, ".2f"),
)
_EARLY_EXITS: tuple[Column, ...] = (("early_exits", "early exits", 12, ""),)
_PROMPT_EXITS: tuple[Column, ...] = (("prompt_early_exits", "of prompts", 10, ""),)
_NOTHING = {"early_exits": 0, "prompt_early_exits": 0, "decode_tok_s": float("nan"), "token_ms": float("nan")}
"""What ``measure`` leaves out where there was none."""


class BenchTable:
    """Lines of a table: with ``drafts`` also how many were accepted, with ``early_exits`` how many there were, with
    ``prompt_exits`` how many of prompts, with the KV policy's ``report_columns``."""

    def __init__(
        self, drafts: bool, early_exits: bool, prompt_exits: bool = False, policy: tuple[Column, ...] = ()
    ) -> None:
        more = ((drafts, _DRAFTS), (early_exits, _EARLY_EXITS), (prompt_exits, _PROMPT_EXITS), (True, policy))
        self._columns = [*_WORKLOAD, *(column for is_there, columns in more if is_there for column in columns)]

    def head(self) -> str:
        """Return the line of titles."""
        return " ".join(_cell(title, width) for _, title, width, _ in self._columns)

    def row(self, workload: Workload, result: dict[str, Any]) -> str:
        """Return the line of one workload and its ``measure``."""
        values = _NOTHING | dataclasses.asdict(workload) | result
        return " ".join(_cell(format(values[key], form), width) for key, _, width, form in self._columns)


def _cell(text: str, width: int) -> str:
    return text.ljust(-width) if width < 0 else text.rjust(width)
