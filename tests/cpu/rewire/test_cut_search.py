"""Choosing the cut, and the similarity of the layers' inputs."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvforge.cli import main
from kvforge.common.errors import KvforgeError
from kvforge.rewire.cut_search import Candidate, choose_cut
from kvforge.rewire.inputs import LayerInputs
from kvforge.rewire.similarity import input_similarity, similarity_to_remaining
from tests.support.models.checkpoints import load_weights, make_checkpoint
from tests.support.rounding import assert_within, sum_error


@pytest.fixture
def constructed(tmp_path: Path) -> Path:
    """Six layers of which those from 3 on add nothing, so that what enters 3, 4 and 5 is the same."""
    source = make_checkpoint(tmp_path / "source", "llama", num_hidden_layers=6)
    weights = load_weights(source)
    for layer in (3, 4, 5):
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            weights[f"model.layers.{layer}.{name}.weight"].zero_()
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "text.txt").write_text("Sphinx of black quartz, judge my vow; 16 jugs, 25 wizards. " * 200)
    return source


ROUNDED = 1e-9
"""Shares that are squares of fp32's errors: (64 terms of 1.2e-7)^2 is 6e-11 of what is explained."""


def test_auto_finds_where_nothing_more_happens(constructed: Path, tmp_path: Path, capsys) -> None:
    command = ["rewire", str(constructed), str(tmp_path / "out"), "--cut-layer", "auto", "--init", "ridge", "--json"]
    options = ["--calibration", str(tmp_path / "text.txt"), "--num-samples", "24", "--num-tokens", "100"]
    figure = tmp_path / "similarity.svg"
    assert main([*command, *options, "--quality-budget", "1e-6", "--plot", str(figure)]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["cut"] == 3
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_key_value_layers"] == 3
    candidates = {candidate["cut"]: candidate for candidate in summary["candidates"]}
    assert list(candidates) == [1, 2, 3, 4, 5]
    assert [candidates[cut]["prefill_reduction"] for cut in (1, 3, 5)] == pytest.approx([5 / 6, 1 / 2, 1 / 6])
    assert candidates[2]["worst_residual"] > 1e-3 and candidates[3]["worst_residual"] < ROUNDED
    assert candidates[2]["worst_residual"] >= candidates[2]["mean_residual"] > 0
    similarity = torch.tensor(summary["similarity"])
    # A cosine of equal states: sums of 64 products, over 2400 tokens.
    assert_within(similarity[3:, 3:], torch.ones(3, 3), sum_error(64, 64, 64))
    assert candidates[3]["mean_similarity"] == pytest.approx(1) and candidates[5]["mean_similarity"] is None
    assert candidates[1]["mean_similarity"] == pytest.approx(float(similarity[1, 2:].mean()))
    assert figure.read_text().lstrip().startswith("<?xml")


def test_a_larger_budget_cuts_earlier(constructed: Path, tmp_path: Path, capsys) -> None:
    command = ["rewire", str(constructed), str(tmp_path / "out"), "--cut-layer", "auto", "--quality-budget", "100"]
    options = ["--calibration", str(tmp_path / "text.txt"), "--num-samples", "8", "--num-tokens", "100"]
    assert main([*command, *options]) == 0
    out = capsys.readouterr().out
    assert "1 *" in out and "83.3%" in out and "llama_swiftkv, cut 1 of 6 layers" in out


def test_no_cut_within_the_budget_is_one_sentence() -> None:
    candidates = [Candidate(1, 0.5, 0.9, 0.2, 0.4), Candidate(2, 0.25, 0.95, 0.1, 0.15)]
    assert choose_cut(candidates, 0.4) == 1 and choose_cut(candidates, 0.2) == 2
    with pytest.raises(KvforgeError, match=r"the best, 2, leaves 0\.15; raise the budget or name a --cut-layer\."):
        choose_cut(candidates, 0.1)


def test_similarity_is_the_mean_cosine_over_tokens(tmp_path: Path) -> None:
    states = torch.tensor([[[3.0, 0.0], [0.0, 1.0], [2.0, 0.0]], [[1.0, 0.0], [0.0, 9.0], [0.0, 1.0]]])
    inputs = LayerInputs(tmp_path, [2, 1], 2)
    for layer in (0, 1):
        inputs.file(layer).write_bytes(states[layer].numpy().tobytes())
    similarity = input_similarity(inputs, 2)
    assert_within(similarity, torch.tensor([[1.0, 2 / 3], [2 / 3, 1.0]]).double(), sum_error(2, 2, 2, 3))
    assert similarity_to_remaining(similarity) == [pytest.approx(2 / 3), None]
