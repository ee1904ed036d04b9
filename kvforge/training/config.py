"""The frozen recipe of the tiny model: sizes, seeds and schedules. The assets come from this file alone."""

from dataclasses import dataclass

from kvforge.training.model import ModelConfig


@dataclass(frozen=True)
class Stage:
    """Training at one sequence length: `sequences` of `length` tokens per step.

    Ends after `max_steps`, or earlier (not before `min_steps`) once the running average of the teacher-forced
    accuracy on needle answers reaches `target`.
    """

    length: int
    sequences: int
    max_steps: int
    target: float = 2.0
    min_steps: int = 0


@dataclass(frozen=True)
class TeacherConfig:
    """`lr` is warmed up over `warmup_steps`, then constant; in the last stage it falls to a tenth."""

    model: ModelConfig
    stages: tuple[Stage, ...]
    seed: int = 0
    lr: float = 2e-3
    weight_decay: float = 0.05
    warmup_steps: int = 60
    clip_norm: float = 1.0
    threads: int = 2
    checkpoint_every: int = 100


@dataclass(frozen=True)
class StudentConfig:
    """Distillation (arXiv 2410.03960, section 4): only the SwiftKV projections and norm are trained.

    `hidden_weight` is the weight of the hidden-state error. With `train_upper` the other weights of
    the layers from `cut` on are trained too.
    """

    cut: int = 4
    group_size: int = 2
    stages: tuple[Stage, ...] = ()
    seed: int = 1
    lr: float = 1e-3
    warmup_steps: int = 30
    temperature: float = 2.0
    hidden_weight: float = 1.0
    train_upper: bool = False
    clip_norm: float = 1.0
    threads: int = 2
    checkpoint_every: int = 50


@dataclass(frozen=True)
class TokenizerConfig:
    vocab_size: int = 1664
    seed: int = 0
    num_items: int = 5000


TINY_TOKENIZER = TokenizerConfig()
TINY_MODEL = ModelConfig(vocab_size=TINY_TOKENIZER.vocab_size)
TINY_TEACHER = TeacherConfig(
    model=TINY_MODEL,
    stages=(
        Stage(length=128, sequences=64, max_steps=1200, target=0.93, min_steps=200),
        Stage(length=256, sequences=32, max_steps=600, target=0.94, min_steps=40),
        Stage(length=512, sequences=16, max_steps=600, target=0.95, min_steps=40),
        Stage(length=1024, sequences=8, max_steps=600, target=0.985, min_steps=200),
        Stage(length=2048, sequences=4, max_steps=20),
        Stage(length=1024, sequences=8, max_steps=200),
    ),
    checkpoint_every=50,
)
TINY_STUDENT = StudentConfig(
    stages=(Stage(length=512, sequences=16, max_steps=100), Stage(length=1024, sequences=8, max_steps=300))
)
