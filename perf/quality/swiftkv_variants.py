"""The rows of ``perf.quality.swiftkv``: what is cut, shared and trained in each, and the tables they belong to."""

from collections.abc import Iterable
from dataclasses import dataclass

NUM_LAYERS = 8
"""Of the tiny teacher."""
RECIPES = {
    "keys": (("needle_single", 0.7), ("amounts", 0.3)),
    "arithmetic": (("arithmetic", 1.0),),
}
"""Tasks and their shares in the documents of a distillation: two that look up a key, one that looks up nothing."""


@dataclass(frozen=True)
class Variant:
    """``cut`` None is the teacher. ``steps`` 0 is no distillation; ``train`` full changes every weight of the student,
    not only SwiftKV's. ``merged_heads``: all KV heads of a layer above the cut are one (sharing within a layer).
    ``recipe``: what the documents are that it is distilled on, of ``RECIPES``, or all of the teacher's. ``num_layers``:
    the teacher's."""

    name: str
    cut: int | None
    group_size: int = 1
    init: str = "mean"
    distilled: bool = True
    train: str = "partial"
    merged_heads: bool = False
    seed: int = 1
    recipe: str = "all"
    num_layers: int = NUM_LAYERS

    @property
    def is_trained(self) -> bool:
        """Whether there is anything to distil."""
        return self.distilled and self.cut is not None

    @property
    def slug(self) -> str:
        """Name of the variant's folders."""
        if self.cut is None:
            return "teacher"
        parts = [f"cut{self.cut}", f"group{self.group_size}", self.init, self.train if self.distilled else "untrained"]
        parts += ["merged"] if self.merged_heads else []
        parts += [self.recipe] if self.recipe != "all" else []
        return "-".join([*parts, f"seed{self.seed}"] if self.distilled else parts)

    @property
    def prefill_reduction(self) -> float:
        """Share of the layers that a prompt token skips."""
        return 0.0 if self.cut is None else 1 - self.cut / self.num_layers

    @property
    def kv_reduction(self) -> float:
        """Share of the cache that sharing saves (a ragged last group included); 2 KV heads can be merged to one."""
        if self.cut is None:
            return 0.0
        upper = self.num_layers - self.cut
        owners = -(-upper // self.group_size)
        return (upper - owners / (2 if self.merged_heads else 1)) / self.num_layers


TEACHER = Variant("no cut", None)
HALF = Variant("cut 4", 4)
ACROSS = Variant("cut 4, 4-way", 4, 4)
DEEP = Variant("cut 1", 1)
DEEP_ACROSS = Variant("cut 1, 4-way", 1, 4)

REDUCTION = (
    TEACHER, Variant("cut 6", 6), HALF, Variant("cut 3", 3), DEEP, Variant("cut 4, 2-way", 4, 2), ACROSS, DEEP_ACROSS,
)  # fmt: skip
"""As the paper's Table 2: prefill reduction and AcrossKV, distilled."""

RECOVERY = tuple(
    Variant(f"{base.name}, {how}", base.cut, base.group_size, distilled=distilled, train=train)
    for base in (HALF, ACROSS, DEEP, DEEP_ACROSS)
    for how, distilled, train in (
        ("no distillation", False, "partial"),
        ("partial", True, "partial"),
        ("full", True, "full"),
    )
    if base.cut == 4 or train == "partial"
)
"""As the paper's Table 6: without distillation, training SwiftKV's weights, training all."""

SHARING = (
    Variant("across layers (AcrossKV 2-way)", 4, 2),
    Variant("within a layer (one KV head)", 4, 1, merged_heads=True),
)
"""As a row of the paper's Appendix C: the same cache, shared between layers or within."""

INITS = tuple(
    Variant(
        f"{base.name}, {init}, {'distilled' if distilled else 'no distillation'}",
        *(base.cut, base.group_size),
        init,
        distilled,
    )
    for base in (DEEP, ACROSS)
    for init in ("copy", "mean", "fold", "ridge")
    for distilled in (False, True)
    if init in ("mean", "ridge") or not (distilled or (init == "copy" and base.group_size == 1))
)
"""Where the new projections start from (copy is mean where nothing is shared); distilled, the paper's and the fitted
one."""

TABLES = {"reduction": REDUCTION, "recovery": RECOVERY, "sharing": SHARING, "inits": INITS}


def variants_of(tables: Iterable[str] = TABLES) -> list[Variant]:
    """Every row of the tables once, the teacher first; rows of several tables are the same variant under the first
    table's name."""
    unique = {TEACHER.slug: TEACHER}
    for variant in (row for table in tables for row in TABLES[table]):
        unique.setdefault(variant.slug, variant)
    return list(unique.values())
