"""Layers that keep a state in the differentiable model: the reference's logits, packed samples, and training."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvforge.checkpoint.model import check_weights, open_model, read_model_config
from kvforge.common.errors import CheckpointError, KvforgeError
from kvforge.distill import DistillConfig, distill_checkpoint
from kvforge.distill.draft_run import train_draft_head
from kvforge.prediction.config import PredictConfig
from kvforge.prediction.run import train_predictor
from kvforge.quantize import quantize_checkpoint
from kvforge.rewire import RewireOptions, rewire_checkpoint
from kvforge.swiftkv import SwiftKVForCausalLM, load_model, make_layout
from model_defs.reference import reference_logits
from tests.support.models.checkpoints import MAMBA, load_weights, make_checkpoint
from tests.support.rounding import assert_near, config_of, model_error

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gated convolutions": ("lfm2", {"num_hidden_layers": 5, "full_attn_idxs": [1, 3], "layer_types": None}),
    "Mamba-2": ("granitemoehybrid", {**MAMBA, "num_hidden_layers": 4}),
    "Mamba-2 with biases": ("bamba", {"num_hidden_layers": 5, "attn_layer_indices": [1, 3], "attention_bias": True}),
    "linear attention": ("qwen3_5_text", {"num_hidden_layers": 5, "full_attention_interval": 2}),
    "the same by key head, experts in some layers": (
        "qwen3_next",
        {"num_hidden_layers": 5, "full_attention_interval": 2, "mlp_only_layers": [1, 3]},
    ),
    "linear attention and experts": ("qwen3_5_moe_text", {"num_hidden_layers": 4, "full_attention_interval": 2}),
    "decays by channel": (
        "kimi_linear",
        {"layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"]},
    ),
    "Mamba-2 and experts beside an MLP": ("granitemoehybrid", {**MAMBA, "num_local_experts": 6}),
}


def tokens_of(*shape: int) -> Tensor:
    return torch.randint(3, 320, shape, generator=torch.Generator().manual_seed(7))


def loaded(path: Path, **options: Any) -> SwiftKVForCausalLM:
    checkpoint = open_model(path)
    return load_model(checkpoint, read_model_config(checkpoint), torch.float32, **options)


def rewired(folder: Path, case: str) -> tuple[Path, Path]:
    """A checkpoint, and the same with a cut and its teacher's projections."""
    family, fields = CASES[case]
    path = make_checkpoint(folder / "c", family, **fields)
    rewire_checkpoint(path, folder / "r", RewireOptions(cut=2, init="fold"))
    return path, folder / "r"


@pytest.mark.parametrize("case", CASES)
def test_teacher_and_student_are_the_references(case: str, tmp_path: Path) -> None:
    """Also of samples that are packed, as if each were alone."""
    plain, cut = rewired(tmp_path, case)
    ids, config = tokens_of(2, 40), config_of(cut)
    rounding, model = model_error(config, ids.shape[1]), loaded(cut, with_teacher=True)
    lengths = ([17, 1, 22], [3, 37])
    segments = torch.stack([torch.repeat_interleave(torch.arange(len(each)), torch.tensor(each)) for each in lengths])
    packed = make_layout(config, ids.shape[1], segments)
    with torch.no_grad():
        alone = reference_logits(config_of(plain), load_weights(plain), ids[0])
        assert_near(loaded(plain)(ids[:1])[0], alone, rounding)
        for layout, parts in ((make_layout(config, ids.shape[1]), ([40], [40])), (packed, lengths)):
            hidden = model.model.lower(ids, layout)
            for is_teacher, path in ((True, plain), (False, cut)):
                found = model.head(model.model.upper(hidden, layout, teacher=is_teacher)[0])
                weights, sizes = load_weights(path), config_of(path)
                for row, own, each in zip(found, ids, parts, strict=True):
                    expected = [reference_logits(sizes, weights, part) for part in own.split(each)]
                    assert_near(row, torch.cat(expected), rounding, (is_teacher, each))


@pytest.mark.parametrize("case", [case for case in CASES if case != "Mamba-2 with biases"])
def test_distilling_trains_what_the_cut_added(case: str, tmp_path: Path) -> None:
    """Every tensor that the cut added learns, and nothing else changes; the student's checkpoint is the trained one."""
    _, cut = rewired(tmp_path, case)
    samples = (json.dumps({"text": f"{i} plus {i + 1} is {2 * i + 1}."}) for i in range(300))
    (tmp_path / "texts.jsonl").write_text("\n".join(samples))
    config = DistillConfig(length=32, batch_size=4, micro_batch=4, max_steps=12, lr=3e-3, dtype="float32", device="cpu")
    distill_checkpoint(cut, tmp_path / "d", tmp_path / "texts.jsonl", config, progress=False)
    student = open_model(tmp_path / "d")
    sizes = read_model_config(student)
    check_weights(student, sizes)
    before, after = load_weights(cut), load_weights(tmp_path / "d")
    new = {name for name in after if "_swiftkv" in name}
    assert all(any(f".layers.{layer}." in name for name in new) for layer in sizes.upper_linear)
    assert all(torch.equal(after[name], before[name]) != (name in new) for name in after)


def test_an_early_exit_is_refused_before_work_begins(tmp_path: Path) -> None:
    plain, cut = rewired(tmp_path, "gated convolutions")
    before, absent = sorted(tmp_path.iterdir()), tmp_path / "absent.txt"
    options = RewireOptions(cut=None, init="ridge", early_exit=True)
    for make in (
        lambda: distill_checkpoint(cut, tmp_path / "made", absent, DistillConfig(early_exit=True)),
        lambda: rewire_checkpoint(plain, tmp_path / "made", options, calibration=absent),
        lambda: rewire_checkpoint(plain, tmp_path / "made", replace(options, cut=1), calibration=absent),
    ):
        with pytest.raises(KvforgeError, match="it has an early exit; take it without"):
            make()
        assert sorted(tmp_path.iterdir()) == before


def test_what_is_not_calibrated_is_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "c", "lfm2", num_hidden_layers=2)
    for make in (
        lambda: quantize_checkpoint(path, tmp_path / "made", "int4"),
        lambda: train_predictor(path, path, tmp_path / "made", None, PredictConfig()),
        lambda: train_draft_head(path, tmp_path / "made", tmp_path / "texts.jsonl", DistillConfig()),
    ):
        with pytest.raises(CheckpointError, match="gated short convolutions, for which kvforge calibrates no codes"):
            make()
