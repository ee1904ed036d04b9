"""What a distillation does: data sizes, optimizer, loss and precision, all frozen."""

import dataclasses
import math
from dataclasses import dataclass

from kvforge.common.errors import KvforgeError
from kvforge.common.number_formats import whole_name

TRAIN = ("partial", "upper", "full")
SCHEDULES = ("cosine", "linear", "constant")
DTYPES = ("bfloat16", "float32")
DEVICES = ("auto", "cpu", "cuda")

WITHOUT_EFFECT_ON_THE_RESULT = ("micro_batch", "checkpoint_every", "device")
"""Fields that an interrupted run may be continued with other values of (the result differs by rounding at most)."""


@dataclass(frozen=True)
class DistillConfig:
    """Hyperparameters of `kvforge distill`; where the SwiftKV paper gives a value (arXiv 2410.03960),
    it is the default.

    ``train``: ``partial`` changes the SwiftKV projections and norms and the early-exit head; ``upper`` also all other
    weights of the layers above the cut; ``full`` all of the student's weights, with a frozen copy as the teacher.
    ``length`` is in tokens, ``batch_size`` in packed sequences per optimizer step over all processes, and
    ``micro_batch`` in sequences that one process runs at once. ``max_steps`` takes precedence over ``epochs``.
    ``warmup`` is a share of all steps. ``dtype`` ``bfloat16``: autocast, trained weights and optimizer in
    fp32; ``bf16`` and ``fp32`` are taken for the whole names.

    Raises:
        KvforgeError: a value that makes no sense.
    """

    train: str = "partial"
    early_exit: bool = False
    epochs: float = 2.0
    max_steps: int | None = None
    length: int = 8192
    batch_size: int = 32
    micro_batch: int = 1
    lr: float = 3e-4
    schedule: str = "cosine"
    warmup: float = 0.05
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.98)
    clip_norm: float = 1.0
    temperature: float = 2.0
    hidden_weight: float = 1.0
    seed: int = 0
    dtype: str = "bfloat16"
    device: str = "auto"
    checkpoint_every: int = 100

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", whole_name(self.dtype))
        for name, known in (("train", TRAIN), ("schedule", SCHEDULES), ("dtype", DTYPES), ("device", DEVICES)):
            if getattr(self, name) not in known:
                raise KvforgeError(f"--{name} {getattr(self, name)!r} is unknown; choose from {', '.join(known)}.")
        for name in ("length", "batch_size", "micro_batch", "checkpoint_every"):
            _check(name, getattr(self, name), getattr(self, name) >= 1, "at least 1")
        if self.max_steps is not None:
            _check("max_steps", self.max_steps, self.max_steps >= 1, "at least 1")
        for name in ("epochs", "lr", "clip_norm", "temperature"):
            _check(name, getattr(self, name), 0 < getattr(self, name) < math.inf, "positive and finite")
        _check("seed", self.seed, self.seed >= 0, "0 or more")
        for name in ("weight_decay", "hidden_weight"):
            _check(name, getattr(self, name), 0 <= getattr(self, name) < math.inf, "0 or more, and finite")
        _check("warmup", self.warmup, 0 <= self.warmup <= 1, "a share of the steps, from 0 to 1")
        _check("betas", self.betas, all(0 <= beta < 1 for beta in self.betas), "from 0 to below 1")

    def total_steps(self, num_sequences: int) -> int:
        """Optimizer steps of a run over ``num_sequences`` packed sequences; every one of them is a full batch."""
        if self.max_steps is not None:
            return self.max_steps
        return max(1, math.ceil(self.epochs * num_sequences / self.batch_size))

    def identity(self) -> dict[str, object]:
        """The fields that the result depends on, as JSON values."""
        values = dataclasses.asdict(self) | {"betas": list(self.betas)}
        return {name: value for name, value in values.items() if name not in WITHOUT_EFFECT_ON_THE_RESULT}


def _check(name: str, value: object, good: bool, need: str) -> None:
    if not good:
        raise KvforgeError(f"--{name.replace('_', '-')} is {value}; it must be {need}.")
