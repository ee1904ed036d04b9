"""Engines of a checkpoint under many KV policies with budgets of tokens: graphs that do not know a policy's parameters
serve several of them."""

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from kvforge.checkpoint.model import open_model, read_model_config
from kvforge.common.errors import BuildError
from kvforge.compiler import BuildOptions
from kvforge.kv_policies import Need, parse, policies
from kvforge.kv_policies.eviction.policy import Eviction
from kvforge.manifest import load_manifest, save_manifest
from perf.harness.engines import cached_engine

FULL = "full"
LARGEST = 1024
"""The budget with which the engines of rules are built whose graphs do not know one."""
RULES = sorted(
    name
    for name, one in policies().items()
    if issubclass(one, Eviction) and Need.TOKEN_SCORES not in one().needs  # a scorer is trained for a model
)
NAMES = (*RULES, "quest", "shadowkv")


class Cell(NamedTuple):
    """A policy with a budget of tokens; the full cache has none."""

    name: str
    budget: int | None = None


def policy_of(name: str, budget: int, rank: int) -> str:
    """Return the policy as ``kvforge build`` takes it: RoCo's spread is an eighth of the budget, ShadowKV has eight
    outliers a head and this ``rank``."""
    if name == "shadowkv":
        return f"shadowkv:sparse_budget={budget},rank={rank},num_outlier_chunks=8"
    return f"{name}:budget={budget}" + (f",spread={budget // 8}" if name == "roco" else "")


def cells_of(names: Sequence[str], budgets: Sequence[int]) -> list[Cell]:
    """Return the full cache, then each policy with each budget that is not less than what the policy protects."""
    cells = [Cell(FULL)]
    for name in names:
        for budget in budgets:
            try:
                parse(policy_of(name, budget, rank=1))
            except BuildError:
                continue
            cells.append(Cell(name, budget))
    return cells


@dataclass(frozen=True)
class Engines:
    """Engines of a checkpoint below ``work``, built or copied when they are asked for. ShadowKV's rank is half of the
    dimensions of a token's keys."""

    checkpoint: Path
    options: BuildOptions
    work: Path
    prefix: str = ""
    """Of the engines' names, where those of several checkpoints lie side by side."""

    def of(self, cell: Cell) -> Path:
        """Return a cell's engine."""
        if cell.budget is None:
            return cached_engine(self.work / f"{self.prefix}{FULL}", self.checkpoint, self.options)
        policy = self._policy(cell.name, cell.budget)
        named = self.work / f"{self.prefix}{cell.name}-{cell.budget}"
        if cell.name == "shadowkv" or policies()[cell.name]().insertion.views_pools:  # the graphs know the budget
            return cached_engine(named, self.checkpoint, replace(self.options, kv_policy=policy))
        largest = replace(self.options, kv_policy=self._policy(cell.name, LARGEST))
        return with_parameters(
            cached_engine(self.work / f"{self.prefix}{cell.name}", self.checkpoint, largest), named, policy
        )

    def _policy(self, name: str, budget: int) -> str:
        config = read_model_config(open_model(self.checkpoint))
        return policy_of(name, budget, config.num_kv_heads * config.head_dim // 2)


def with_parameters(engine: Path, copy: Path, policy: str) -> Path:
    """Return ``copy``, made if it is not there yet: the engine's files, with the parameters of ``policy`` in its
    manifest. The policy is the engine's own, and one whose graphs do not know them (``views_pools`` is false)."""
    if not copy.exists():
        shutil.copytree(engine, copy, copy_function=os.link)
        manifest = replace(load_manifest(engine), kv_policy_parameters=parse(policy).parameters)
        (copy / "engine.json").unlink()
        save_manifest(manifest, copy)
    return copy
