"""Distilling models with a blind cut: students see what engines will, and the teacher is the model as it was."""

import json
from pathlib import Path

import pytest
import torch

from kvforge.checkpoint.model import open_model, read_model_config
from kvforge.common.errors import KvforgeError
from kvforge.distill import DistillConfig
from kvforge.distill.distiller import Distiller
from kvforge.distill.packing import DataSettings
from kvforge.distill.run import distill_checkpoint
from kvforge.swiftkv import make_layout
from model_defs.reference import reference_logits
from tests.support.models.checkpoints import load_weights, make_blind, make_checkpoint
from tests.support.models.distillation import load_with_teacher, random_data
from tests.support.rounding import assert_near, model_error

FAST = DistillConfig(dtype="fp32", device="cpu", max_steps=8, batch_size=4, micro_batch=4, lr=3e-3, warmup=0.0)
ANSWERS = DataSettings(64, "answers")


def blind(path: Path, family: str = "llama", group_size: int = 1) -> Path:
    return make_blind(make_checkpoint(path, family), 2, 8, group_size)


@pytest.mark.parametrize("family", ["llama", "qwen3", "olmo2"])
def test_students_see_what_the_reference_sees(family: str, tmp_path: Path) -> None:
    """Two packed samples, one with two answers: of the second one the first is a part of the prompt."""
    path = blind(tmp_path / "c", family)
    config, weights, model = read_model_config(open_model(path)), load_weights(path), load_with_teacher(path)
    ids = torch.randint(3, 320, (1, 50), generator=torch.Generator().manual_seed(1))
    segments = torch.tensor([[0] * 36 + [1] * 14])
    answers = torch.zeros(1, 50, dtype=torch.bool)
    rows = {(0, 36, 13): range(12, 17), (0, 36, 25): range(24, 35), (36, 50, 3): range(38, 49)}
    for places in rows.values():
        answers[0, list(places)] = True
    layout = make_layout(config, 50, segments, answers=answers)
    with torch.no_grad():
        got = model(ids, layout)[0]
        for (begin, end, num_prompt_tokens), places in rows.items():
            expected = reference_logits(config, weights, ids[0, begin:end], num_prompt_tokens=num_prompt_tokens)
            chosen = expected[[place - begin for place in places]]
            assert_near(got[list(places)], chosen, model_error(config, 50), (begin, num_prompt_tokens))
        teacher = Distiller(model, FAST).teacher
        output, _ = teacher.model.upper(teacher.model.lower(ids, layout), layout, teacher=True)
        whole = reference_logits(config.first_layers(config.num_layers), weights, ids[0, :36])
        assert_near(teacher.head(output)[0, :36], whole, model_error(config, 50))


@pytest.mark.parametrize(("train", "layers"), [("partial", ()), ("upper", (2, 3)), ("full", (0, 1, 2, 3))])
def test_a_run_learns_and_keeps_all_names(train: str, layers: tuple[int, ...], tmp_path: Path) -> None:
    path, config = blind(tmp_path / "c"), DistillConfig(**{**vars(FAST), "train": train})
    model = load_with_teacher(path)
    distiller = Distiller(model, config)
    batch = random_data().batch([0, 1, 2])
    before = {name: tensor.clone() for name, tensor in distiller.teacher.state_dict().items()}
    first = distiller(batch)[0].item()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, 2e-4)
    for _ in range(8):
        optimizer.zero_grad()
        distiller(batch)[0].backward()
        optimizer.step()
    assert distiller(batch)[0].item() < 0.97 * first
    assert all(torch.equal(before[name], tensor) for name, tensor in distiller.teacher.state_dict().items())

    data = tmp_path / "data.jsonl"
    lines = [{"prompt": "abcdefgh" * 2 + str(i), "completion": "xyz" * 3} for i in range(60)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    distill_checkpoint(path, tmp_path / "out", data, config, ANSWERS, progress=False)
    old, new = load_weights(path), load_weights(tmp_path / "out")
    assert old.keys() == new.keys() and read_model_config(open_model(tmp_path / "out")).is_blind
    changed = {name for name in old if not torch.equal(old[name], new[name])}
    own = {f"model.layers.{layer}.self_attn.{part}_proj.weight" for layer in (2, 3) for part in "qkv"}
    assert own <= changed and (train != "partial" or changed == own)
    assert {int(name.split(".")[2]) for name in changed if ".layers." in name} == set(layers or (2, 3))


def test_what_it_is_not_distilled_with_is_refused(tmp_path: Path) -> None:
    path, data = blind(tmp_path / "c"), tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt": "abc", "completion": "xyz"}) + "\n")
    grouped = blind(tmp_path / "g", group_size=2)
    for source, settings, more, sentence in (
        (path, DataSettings(64), {}, "say which tokens are answers: --mask answers."),
        (path, ANSWERS, {"keep_teacher": True}, "leave out --keep-teacher."),
        (grouped, ANSWERS, {}, "rewire with --group-size 1."),
    ):
        with pytest.raises(KvforgeError) as error:
            distill_checkpoint(source, tmp_path / "out", data, FAST, settings, progress=False, **more)
        assert sentence in str(error.value)
    early = DistillConfig(**{**vars(FAST), "early_exit": True})
    with pytest.raises(KvforgeError, match="leave out --early-exit"):
        distill_checkpoint(path, tmp_path / "out", data, early, ANSWERS, progress=False)
