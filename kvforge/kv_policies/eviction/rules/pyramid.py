"""PyramidKV (arXiv 2406.02069): SnapKV's scores, budgets that fall from layer to layer."""

from dataclasses import dataclass
from typing import ClassVar

from kvforge.kv_policies.eviction.budgets.pyramid import PyramidBudgets
from kvforge.kv_policies.eviction.rules.snapkv import SnapKV


@dataclass(frozen=True, init=False)
class PyramidKV(PyramidBudgets):
    """At the prompt's end, owners keep fewer tokens the later they come, by SnapKV's scores (section 4.3)."""

    kind: ClassVar[type[SnapKV]] = SnapKV
    name: ClassVar[str] = "pyramid"
    title: ClassVar[str] = "PyramidKV"
