"""What a format loses of a model whose channels, keys and values have outliers, beside the same model without them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvforge.compiler.options import BuildOptions
from kvforge.tokenization.calibration import calibration_samples
from tests.support.models.outliers import with_outliers
from tests.support.schedules.step_driver import StepDriver
from tests.support.sessions.eager import eager_session

TEACHER = Path(__file__).resolve().parents[3] / "model_defs" / "assets" / "tiny-teacher"
CACHES = ("fp8", "int8", "k8v4", "int4", "kivi4", "kivi3", "kivi2")
WEIGHTS = ("int8", "int4", "int4_scales", "int4_zeros")
MOST = 2.0
"""How many times as much KL a format may lose with outliers as without."""
EXCEPTIONS: dict[str, float] = {"fp8": 3.3, "int8": 4.5}
"""Caches that lose more, and the most they may, half as much again as was measured (2.2 and 3.0 times): a token's scale
is that of its largest number, which is eight times as large here, and heads are not rotated."""
FLOAT32 = 1e-6
"""Nats a token between a model and itself with outliers: of float32's rounding, thousandths of what int8 loses."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return TEACHER, with_outliers(TEACHER, tmp_path_factory.mktemp("outliers") / "model")


@pytest.fixture(scope="module")
def exact(models: tuple[Path, Path]) -> list[Tensor]:
    return [log_probs(path, dtype="float32") for path in models]


@torch.inference_mode()
def log_probs(path: Path, **options: Any) -> Tensor:
    session = eager_session(path, BuildOptions(page_size=32, max_num_tokens=256, max_seq_len=256, **options))
    texts = calibration_samples(TEACHER, session.config.vocab_size, None, 5, 192)
    return torch.cat([StepDriver(session, 8).run(ids) for ids in texts]).log_softmax(-1)


def kl(exact: Tensor, found: Tensor) -> float:
    return float((exact.exp() * (exact - found)).sum(-1).mean())


def test_the_model_stays_the_same(exact: list[Tensor]) -> None:
    assert abs(kl(*exact)) < FLOAT32


@pytest.mark.parametrize("cache", CACHES)
def test_a_cache(cache: str, models: tuple[Path, Path], exact: list[Tensor]) -> None:
    check(cache, models, exact, dtype="float32", kv_dtype=cache)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_weights(weights: str, models: tuple[Path, Path], exact: list[Tensor]) -> None:
    check(f"{weights} weights", models, exact, dtype="bfloat16", weight_dtype=weights, calibration="none")


def check(name: str, models: tuple[Path, Path], exact: list[Tensor], **options: Any) -> None:
    lost = [kl(one, log_probs(path, **options)) for one, path in zip(exact, models, strict=True)]
    print(f"\n{name}: {lost[0]:.3g} nats, with outliers {lost[1]:.3g}, {lost[1] / lost[0]:.2f} times as much")
    assert 0 < lost[1] < EXCEPTIONS.get(name, MOST) * lost[0]
