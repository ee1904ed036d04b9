"""AdaKV (arXiv 2407.11550) over SnapKV's scores: heads whose attention is spread keep more of the prompt."""

from dataclasses import dataclass
from typing import ClassVar

from kvforge.kv_policies.eviction.budgets.heads import HeadBudgets
from kvforge.kv_policies.eviction.rules.snapkv import SnapKV


@dataclass(frozen=True, init=False)
class AdaKV(HeadBudgets):
    """At the prompt's end, the best of all heads' tokens together stay, by SnapKV's scores (section 3.3, Ada-SnapKV),
    and ``floor_percent`` of the budget in each head."""

    kind: ClassVar[type[SnapKV]] = SnapKV
    name: ClassVar[str] = "adakv"
    title: ClassVar[str] = "AdaKV"
