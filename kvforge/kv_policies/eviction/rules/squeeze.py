"""SqueezeAttention (arXiv 2404.04793): SnapKV's scores, few tokens where attention changes little."""

from dataclasses import dataclass
from typing import ClassVar

from kvforge.kv_policies.eviction.budgets.squeeze import SqueezeBudgets
from kvforge.kv_policies.eviction.rules.snapkv import SnapKV


@dataclass(frozen=True, init=False)
class SqueezeAttention(SqueezeBudgets):
    """At the prompt's end, owners whose attention changes hidden states little keep few tokens, by SnapKV's scores."""

    kind: ClassVar[type[SnapKV]] = SnapKV
    name: ClassVar[str] = "squeeze"
    title: ClassVar[str] = "SqueezeAttention"
