"""Quality with quantized weights: checkpoints rounded plainly, and what the table says of them."""

import math
from pathlib import Path

import pytest
import torch

from kvforge.checkpoint.model import open_model
from kvforge.evaluation.compare import Comparison, fidelity
from perf.quality.rounded_weights import by_largest, round_by_largest
from perf.quality.scores import TASKS
from perf.quality.weight import EXPERIMENT, perplexity_ratio
from plugins.packed_linear.int4 import round_to_codes
from tests.support.models.checkpoints import make_checkpoint


def test_rounding_by_the_largest_magnitude_is_that_of_plain_quantizers() -> None:
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    weight[1, 32:] = 0
    codes = round_by_largest(weight)
    assert codes.shape == (4, 64) and not codes.dequantize()[1, 32:].any()
    largest = weight.unflatten(1, (2, 32)).abs().amax(2)
    assert torch.equal(codes.scales, (largest * (2 / 15)).half().float())
    assert ((codes.dequantize() - weight).unflatten(1, (2, 32)).abs().amax(2) <= 0.51 * codes.scales).all()
    searched = round_to_codes(weight)
    assert (searched.dequantize() - weight).square().sum() < (codes.dequantize() - weight).square().sum()


def test_a_checkpoint_keeps_its_plain_codes(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", "llama", dtype=torch.bfloat16, num_hidden_layers=2)
    name = "model.layers.1.mlp.up_proj.weight"
    weight = open_model(path).read_raw(name)
    written = open_model(by_largest(path, tmp_path / "rounded"))
    assert written.has_codes(name) and not written.has_codes("lm_head.weight")
    assert torch.equal(written.read(name, tuple(weight.shape)), round_by_largest(weight).dequantize())
    made = (tmp_path / "rounded" / "config.json").stat().st_mtime_ns
    by_largest(path, tmp_path / "rounded")
    assert (tmp_path / "rounded" / "config.json").stat().st_mtime_ns == made, "written again"


def test_perplexities_are_compared_document_by_document() -> None:
    """Documents are far apart, the models are not: of each the student is 1% worse."""
    nll = (10.0, 400.0)
    compared = Comparison((100, 100), (0.5, 0.5), (90, 90), tuple(x + 100 * math.log(1.01) for x in nll), nll)
    ratio = perplexity_ratio(compared)
    assert ratio == {name: pytest.approx(1.01) for name in ("value", "low", "high")}
    plain = {"model": "no cut", "weights": "bfloat16", "weight_bytes": 8_000_000}
    plain["accuracy"] = {"accuracy": 0.5, "low": 0.4, "high": 0.6, "tasks": dict.fromkeys(TASKS, 0.5)}
    paired = {"difference": -0.01, "low": -0.02, "high": 0.0, "gained": 1, "lost": 2, "p_value": 0.5}
    rounded = {**plain, "weights": "int4", "difference": paired, "texts_changed": 3, "num_tokens": 200}
    rounded["fidelity"] = fidelity(compared) | {"perplexity_ratio": ratio}
    told = {"command": "c", "num_prompts": 4, "length": 50, "seed": 1, "num_documents": 2}
    text = EXPERIMENT.show(told | {"rows": [plain, rounded]})
    assert "20 prompts of 50 tokens" in text and "on 200 tokens of 2 of the prompts" in text
    assert "-1.00 (-2.00 to +0.00), +1 −2, p 0.5 | 3 |" in text and "| +1.00 (+1.00 to +1.00) |" in text
