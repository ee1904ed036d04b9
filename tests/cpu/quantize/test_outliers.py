"""What a format loses of a model whose channels, keys and values have outliers, beside the same model without them.

Outliers of another size make all roundings other ones, of a first token's keys too, which every text has and every
token attends to. So what a cache loses is the mean over several sizes: with one of them alone e4m3 loses 0.6 to 3.5
times as much as without.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvforge.compiler.options import BuildOptions
from kvforge.tokenization.calibration import calibration_samples
from tests.support.models.outliers import HEAD_SIZES, with_outliers
from tests.support.schedules.step_driver import StepDriver
from tests.support.sessions.eager import eager_session

TEACHER = Path(__file__).resolve().parents[3] / "model_defs" / "assets" / "tiny-teacher"
CACHES = ("fp8", "int8", "k8v4", "int4", "kivi4", "kivi3", "kivi2")
WEIGHTS = ("int8", "int4", "int4_scales", "int4_zeros")
MOST = 2.0
"""How many times as much KL a format may lose with outliers as without."""
FLOAT32 = 1e-6
"""Nats a token between a model and itself with outliers: of float32's rounding, thousandths of what int8 loses."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The one without outliers, and one for each size of them."""
    folder = tmp_path_factory.mktemp("outliers")
    return [TEACHER, *(with_outliers(TEACHER, folder / f"{size:.2f}", size) for size in HEAD_SIZES)]


@pytest.fixture(scope="module")
def exact(models: list[Path], full: bool) -> list[list[Tensor]]:
    return [log_probs(path, full, dtype="float32") for path in models]


@torch.inference_mode()
def log_probs(path: Path, full: bool, **options: Any) -> list[Tensor]:
    """Of each text, ``[tokens, vocab]``."""
    session = eager_session(path, BuildOptions(page_size=32, max_num_tokens=256, max_seq_len=256, **options))
    texts = calibration_samples(TEACHER, session.config.vocab_size, None, 20 if full else 5, 192)
    return [StepDriver(session, 8).run(ids).log_softmax(-1) for ids in texts]


def kl(exact: list[Tensor], found: list[Tensor]) -> Tensor:
    """Of each text, nats a token."""
    each = zip(exact, found, strict=True)
    return torch.stack([(one.exp() * (one - other)).sum(-1).mean() for one, other in each])


def test_the_model_stays_the_same(exact: list[list[Tensor]]) -> None:
    assert all(abs(kl(exact[0], other).mean()) < FLOAT32 for other in exact[1:])


@pytest.mark.parametrize("cache", CACHES)
def test_a_cache(cache: str, models: list[Path], exact: list[list[Tensor]], full: bool) -> None:
    check(cache, models, exact, full, dtype="float32", kv_dtype=cache)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_weights(weights: str, models: list[Path], exact: list[list[Tensor]], full: bool) -> None:
    check(f"{weights} weights", models[:2], exact[:2], full, dtype="bfloat16", weight_dtype=weights, calibration="none")


def check(name: str, models: list[Path], exact: list[list[Tensor]], full: bool, **options: Any) -> None:
    each = zip(exact, models, strict=True)
    of_models = torch.stack([kl(one, log_probs(path, full, **options)) for one, path in each])
    of_sizes = of_models[1:].mean(1) / of_models[0].mean()
    of_texts = torch.stack((of_models[0], of_models[1:].mean(0)))
    without, lost = of_texts.mean(1).tolist()
    drawn = torch.randint(of_texts.shape[1], (2000, of_texts.shape[1]), generator=torch.Generator().manual_seed(0))
    low, high = (of_texts[1][drawn].mean(1) / of_texts[0][drawn].mean(1)).quantile(torch.tensor([0.025, 0.975]))
    print(f"\n{name}: {without:.3g} nats, with outliers {lost:.3g}, {lost / without:.2f} times as much, 95% interval "
          f"over texts {low:.2f} to {high:.2f}, by size {of_sizes.min():.2f} to {of_sizes.max():.2f}")  # fmt: skip
    assert 0 < lost < MOST * without
