"""The program that trains tiny hybrids and cuts them, in a few steps."""

import argparse
from pathlib import Path

import pytest
import torch

from model_defs import load_config
from perf.quality import hybrid_cuts
from perf.training.config import HYBRID_SIZES, HYBRIDS, TINY_HF_CONFIG
from perf.training.documents import Batch


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_model_begins_with_states_that_forget_at_many_rates(name: str) -> None:
    config = load_config(TINY_HF_CONFIG | HYBRID_SIZES | HYBRIDS[name])
    assert config.owners == ((1, 5) if config.linear is not None else tuple(range(8)))
    model = hybrid_cuts.initial(config, 0)
    logits = model(torch.arange(3, 60)[None])
    assert 0 < logits.std() < 1 and logits.isfinite().all()
    rates = [p.exp() for name, p in model.named_parameters() if name.endswith("A_log")]
    assert all(1 <= rate.min() < rate.max() <= 16 for rate in rates)
    batch = Batch(torch.arange(3, 60)[None], torch.arange(4, 61)[None], torch.ones(1, 57), torch.zeros(1, 57).long())
    found = hybrid_cuts.compared(model, model, batch)
    assert found["kl"] == 0 and found["same"] == 1 and 6 < found["loss"] < 9


def test_every_way_to_cut_a_model_has_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hybrid_cuts, "DOCUMENTS", hybrid_cuts.Stage(64, 2, max_steps=1, min_density=0.6))
    args = argparse.Namespace(layers=["gated convolutions"], steps=2, distil_steps=2, held_out=3, work=tmp_path)
    report = hybrid_cuts.measure(args)
    rows = {row["cut"]: row for row in report["rows"]}
    assert list(rows) == ["no cut", "copy", "fold", "ridge", "distilled"] and report["tokens"] > report["answers"] > 0
    assert rows["no cut"]["kl"] == 0 and rows["distilled"]["kl"] != rows["fold"]["kl"] > 0
    assert rows["ridge"]["kl"] not in (rows["copy"]["kl"], rows["fold"]["kl"])
    assert hybrid_cuts.measure(args) == report  # nothing is made twice
