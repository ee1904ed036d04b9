"""What training a predictor does, frozen."""

from dataclasses import dataclass, field
from typing import Any

from kvforge.common.errors import KvforgeError
from kvforge.distill import DistillConfig

PARTS = ("maps", "all")


@dataclass(frozen=True)
class PredictConfig:
    """Hyperparameters of ``kvforge predict train``.

    ``loop`` has steps, lengths, rates, the temperature and precision, as in a distillation; its ``train``,
    ``hidden_weight`` and ``early_exit`` say nothing here. ``train``: ``maps`` alone, or ``all`` of the auxiliary model
    that is in use. ``kv_weight`` and ``qk_weight`` are those of the relative L1 errors of K and of V and of the
    relative squared error of scores beside the KL. ``exact_targets``: positions that predict a target are computed by
    the base over the predicted cache, as at inference, and their own K and V are exact; else all are predicted.
    ``num_queries`` of a sequence, evenly spaced, have their scores compared.
    """

    loop: DistillConfig = field(default_factory=DistillConfig)
    train: str = "all"
    kv_weight: float = 1.0
    qk_weight: float = 1.0
    exact_targets: bool = False
    num_queries: int = 128

    def __post_init__(self) -> None:
        if self.train not in PARTS:
            raise KvforgeError(f"--train {self.train!r} is unknown; choose from {', '.join(PARTS)}.")
        for name in ("kv_weight", "qk_weight"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise KvforgeError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be 0 or more.")

    def identity(self) -> dict[str, Any]:
        """The fields that the result depends on, as JSON values."""
        own = {name: getattr(self, name) for name in ("kv_weight", "qk_weight", "exact_targets", "num_queries")}
        return self.loop.identity() | own | {"train": self.train}
