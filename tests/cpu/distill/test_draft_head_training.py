"""`kvforge distill --draft-head`: the module is the head as it drafts, and what is written is read by the build."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kvforge.checkpoint.draft_head import open_draft_head, tokens_of
from kvforge.checkpoint.model import open_model, read_model_config
from kvforge.cli import main
from kvforge.common.errors import CheckpointError, KvforgeError
from kvforge.distill import DistillConfig, draft_trainer
from kvforge.distill.draft_module import DraftModule
from kvforge.distill.draft_run import train_draft_head
from kvforge.swiftkv import make_layout
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.draft_heads import ReferenceHead, make_head, streams

ROUNDING = 1e-4
"""Of float32, in sums of a hundred products after one another, in another order."""
OPTIONS = "--draft-head --length 64 --batch-size 4 --micro-batch 4 --lr 1e-2 --device cpu --dtype float32".split()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "target", cut=2)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "data.jsonl"
    rows = [{"prompt": f"after {i} comes ", "completion": f"{i + 1}"} for i in range(30)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_passes_are_those_of_drafting(tmp_path: Path, target: Path) -> None:
    """In a packed sequence of two samples, with the tokens that are there in place of drafts."""
    path = make_head(tmp_path / "head", target, eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    checkpoint = open_model(target)
    _, head = open_draft_head(path, checkpoint, read_model_config(checkpoint))
    reference, module = ReferenceHead(path, target), DraftModule(64, head)
    module.load_state_dict({k: v for k, v in reference.weights.items() if k not in ("d2t", "t2d")})
    samples = [[5, 6, 7, 8, 9, 30, 31], [40, 41, 42, 43, 44]]
    states = torch.cat([streams(target, tokens, (0, 1, 2)) for tokens in samples])[None]
    ids = torch.tensor([token for tokens in samples for token in tokens])
    segments = torch.tensor([[0] * 7 + [1] * 5])
    layout = make_layout(head.model, 12, segments)
    embedded = reference.table[torch.cat((ids[1:], ids[-1:]))][None]
    with torch.inference_mode():
        passes = module(states, embedded, layout.rotations[head.model.rope], layout.masks[0], 3)
    checked = 0
    for number, output in enumerate(passes):
        for begin, tokens in ((0, samples[0]), (7, samples[1])):
            for last in range(number, len(tokens) - 1):
                hidden = reference._linear(states[0, begin : begin + last - number + 1], "fc")
                for more in range(number + 1):
                    behind = tokens[1 : last - number + more + 2]
                    wanted = reference._layer(behind, hidden, torch.arange(len(behind)))[-1:]
                    hidden = torch.cat((hidden, wanted))
                torch.testing.assert_close(output[0, begin + last], wanted[0], rtol=ROUNDING, atol=ROUNDING)
                checked += 1
    assert checked == 10 + 8 + 6


def test_the_command_writes_a_head_that_is_read(
    target: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    dst, words = tmp_path / "head", ["distill", str(target), "--data", str(data), "--max-steps", "30"]
    assert main([*words, str(dst), *OPTIONS, "--draft-vocab", "90", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["steps"] == 30 and summary["layers"] == [1, 1, 2] and summary["draft_vocab"] == 90
    rows = (tmp_path / "head.training" / "metrics.csv").read_text().splitlines()[1:]
    first, last = (float(row.split(",")[draft_trainer.COLUMNS.index("loss")]) for row in (rows[0], rows[-1]))
    assert last < first / 2
    checkpoint = open_model(target)
    own, head = open_draft_head(dst, checkpoint, read_model_config(checkpoint))
    assert head.layers == (1, 1, 2) and not head.own_embedding and not head.norm_before_residual
    tokens = tokens_of(own, head).tolist()
    assert tokens == sorted(set(tokens)) and {ord(letter) + 3 for letter in "after comes 0123456789"} <= set(tokens)
    weights = load_file(dst / "model.safetensors")
    assert weights["t2d"].nonzero().flatten().tolist() == tokens and weights["midlayer.self_attn.q_proj.weight"].any()
    with pytest.raises(KvforgeError, match="is there and not empty"):
        train_draft_head(target, dst, data, DistillConfig(length=64, batch_size=4, max_steps=1, device="cpu"))


def test_a_run_goes_on_where_it_was_interrupted(
    target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = DistillConfig(length=64, batch_size=4, max_steps=6, lr=1e-2, device="cpu", dtype="float32")
    whole = train_draft_head(target, tmp_path / "whole", data, config, progress=False)
    train = draft_trainer.train_head
    monkeypatch.setattr("kvforge.distill.draft_run.train_head", lambda *a, **k: train(*a, **k, stop_after=2))
    train_draft_head(target, tmp_path / "half", data, config, progress=False)
    monkeypatch.undo()
    more = train_draft_head(target, tmp_path / "half", data, config, progress=False, overwrite=True)
    assert more.steps == whole.steps == 6
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "half"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    with pytest.raises(KvforgeError, match=r"half\.training holds a run with"):
        changed = dataclasses.replace(config, lr=1e-3)
        train_draft_head(target, tmp_path / "half", data, changed, progress=False, overwrite=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--draft-head", "--early-exit"], "--early-exit is for a student, and --draft-head trains none"),
        (["--draft-head", "--train", "full"], "--train is for a student"),
        (["--draft-head", "--hidden-weight", "0"], "--hidden-weight is for a student"),
        (["--draft-head", "--keep-teacher"], "--keep-teacher is for a student"),
        (["--draft-head", "--export-dtype", "bf16"], "--export-dtype is for a student"),
        (["--draft-vocab", "5"], "--draft-vocab goes with --draft-head"),
        (["--draft-head", "--draft-vocab", "321"], "--draft-vocab is 321; give 1 to 320, the tokens of the model"),
        (["--draft-head", "--draft-vocab", "0"], "--draft-vocab is 0; give 1 to 320"),
    ],
)
def test_options_that_do_not_go_together(
    target: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture, words: list[str], message: str
) -> None:
    assert main(["distill", str(target), str(tmp_path / "head"), "--data", str(data), *words]) != 0
    assert message in capsys.readouterr().err


def test_models_that_heads_are_not_trained_for(data: Path, tmp_path: Path) -> None:
    latent = make_checkpoint(tmp_path / "latent", "deepseek_v2")
    with pytest.raises(CheckpointError, match="latent attention"):
        train_draft_head(latent, tmp_path / "head", data, DistillConfig(length=64, device="cpu"))
