"""`kvforge distill` from a rewired checkpoint and a data file to a checkpoint that other parts read."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvforge.checkpoint import open_checkpoint
from kvforge.cli import main, make_parser
from kvforge.common.errors import CheckpointError, KvforgeError
from kvforge.distill import DistillConfig, distill_checkpoint
from kvforge.swiftkv import load_model
from model_defs import load_config
from tests.support.models.checkpoints import load_weights, make_checkpoint
from tests.support.models.distillation import rewired_checkpoint

OPTIONS = "--mask answers --length 64 --batch-size 4 --micro-batch 4 --max-steps 3 --lr 1e-2 --device cpu".split()
SMALL = DistillConfig(length=64, batch_size=4, max_steps=2, lr=1e-2, device="cpu")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = rewired_checkpoint(tmp_path_factory.mktemp("command") / "src", dtype=torch.bfloat16)
    (path / "LICENSE").write_text("terms")
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("command") / "data.jsonl"
    rows = [{"prompt": f"after {i} comes ", "completion": f"{i + 1}"} for i in range(30)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(*words: object) -> int:
    return main(["distill", *map(str, words)])


def test_command_writes_a_student_without_its_teacher(
    source: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    dst = tmp_path / "dst"
    assert run(source, dst, "--data", data, *OPTIONS, "--early-exit", "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["steps"] == 3 and summary["data"]["num_samples"] == 30
    assert {path.name for path in (tmp_path / "dst.training").iterdir()} == {"metrics.csv", "metrics.svg", "state.pt"}
    before, after = load_weights(source), load_weights(dst)
    teacher = {f"model.layers.{layer}.self_attn.{part}_proj.weight" for layer in (2, 3) for part in "qkv"}
    added = {"model.norm_early_exit.weight", "lm_head_early_exit.weight"}
    assert after.keys() == (before.keys() - teacher) | added
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    trained = torch.load(tmp_path / "dst.training" / "state.pt", weights_only=True)["weights"]
    for name, tensor in after.items():
        assert torch.equal(tensor, trained[name].bfloat16() if name in trained else before[name]), name
    assert not torch.equal(after["model.norm_swiftkv.weight"], before["model.norm_swiftkv.weight"])
    checkpoint = open_checkpoint(dst)
    assert checkpoint.hf_config == {**open_checkpoint(source).hf_config, "early_exit": True}
    for name in ("tokenizer.json", "LICENSE"):
        assert (dst / name).read_bytes() == (source / name).read_bytes()
    model = load_model(checkpoint, load_config(checkpoint.hf_config), torch.float32)
    assert model(torch.tensor([[3, 4, 5]])).isfinite().all()


def test_line_at_the_end(source: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert run(source, tmp_path / "dst", "--data", data, *OPTIONS) == 0
    out = capsys.readouterr().out
    assert "30 samples" in out and re.search(r"dst: 3 steps, .* KL \d\.\d+, agreement \d+\.\d%", out)


def test_interrupted_command_continues(source: Path, data: Path, tmp_path: Path, monkeypatch) -> None:
    """The disk is full when the checkpoint is written; given again, the command only writes it."""
    from kvforge.distill import export, train

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(export, "write_sharded", full)
        with pytest.raises(KvforgeError, match="No space left on device"):
            distill_checkpoint(source, tmp_path / "dst", data, SMALL)
    assert {path.name for path in tmp_path.iterdir()} == {"dst.training"}
    monkeypatch.setattr(train._Distillation, "step", None)
    assert distill_checkpoint(source, tmp_path / "dst", data, SMALL).steps == 2
    assert (tmp_path / "dst" / "model.safetensors").is_file()


def test_work_of_another_initialisation_is_refused(source: Path, data: Path, tmp_path: Path) -> None:
    distill_checkpoint(source, tmp_path / "one", data, SMALL, work=tmp_path / "work")
    other = shutil.copytree(source, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights["model.layers.2.self_attn.k_proj_swiftkv.weight"] *= 1.5
    save_file(weights, other / "model.safetensors")
    with pytest.raises(KvforgeError, match="holds a run with another checkpoint to start from;"):
        distill_checkpoint(other, tmp_path / "two", data, SMALL, work=tmp_path / "work")


def test_kept_teacher_and_dtype(source: Path, data: Path, tmp_path: Path) -> None:
    wide = rewired_checkpoint(tmp_path / "wide")
    for src, dtype, expected in (
        (source, None, torch.bfloat16),
        (wide, None, torch.float32),
        (wide, torch.bfloat16, torch.bfloat16),
    ):
        dst = tmp_path / f"{src.name}-{dtype}"
        distill_checkpoint(src, dst, data, SMALL, keep_teacher=True, dtype=dtype)
        before, after = load_weights(src), load_weights(dst)
        assert after.keys() == before.keys()
        assert {tensor.dtype for tensor in after.values()} == {expected}
        frozen = [name for name in before if "_swiftkv" not in name]
        assert all(torch.equal(after[name], before[name].to(expected)) for name in frozen)
    assert json.loads((tmp_path / "wide-torch.bfloat16" / "config.json").read_text())["dtype"] == "bfloat16"


def test_full_training_exports_all_weights(source: Path, data: Path, tmp_path: Path) -> None:
    distill_checkpoint(source, tmp_path / "dst", data, dataclasses.replace(SMALL, train="full"))
    before, after = load_weights(source), load_weights(tmp_path / "dst")
    assert not any(torch.equal(tensor, before[name]) for name, tensor in after.items())


def test_sources_that_cannot_be_distilled(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    plain = make_checkpoint(tmp_path / "plain")
    with pytest.raises(CheckpointError, match="has no SwiftKV layers to distil; give it a cut with kvforge rewire"):
        distill_checkpoint(plain, tmp_path / "dst", data, SMALL)
    alone = make_checkpoint(tmp_path / "alone", cut=2)
    with pytest.raises(CheckpointError, match=r"no model\.layers\.2\.self_attn\.q_proj\.weight.*kvforge rewire"):
        distill_checkpoint(alone, tmp_path / "dst", data, SMALL)
    other = rewired_checkpoint(tmp_path / "other", num_hidden_layers=5)
    hf = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(hf | {"num_hidden_layers": 4}))
    with pytest.raises(CheckpointError, match=r"has more layers than the 4 of its config\.json"):
        distill_checkpoint(other, tmp_path / "dst", data, SMALL)
    capsys.readouterr()
    assert run(alone, tmp_path / "dst", "--data", data) == 1
    error = capsys.readouterr().err
    assert error.startswith("kvforge: error: ") and error.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "other", "plain"]


def test_mistakes_are_found_before_training(source: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    with pytest.raises(KvforgeError, match="there is there and not empty; choose another"):
        distill_checkpoint(source, tmp_path / "there", data, SMALL)
    with pytest.raises(KvforgeError, match="leave out --keep-teacher"):
        distill_checkpoint(source, tmp_path / "dst", data, dataclasses.replace(SMALL, train="upper"), keep_teacher=True)
    with pytest.raises(KvforgeError, match=r"nothing\.jsonl"):
        distill_checkpoint(source, tmp_path / "dst", tmp_path / "nothing.jsonl", SMALL)
    for work in (tmp_path / "dst", tmp_path / "dst" / "work", tmp_path / "there" / ".." / "dst", source):
        with pytest.raises(KvforgeError, match="choose another directory for the run's state"):
            distill_checkpoint(source, tmp_path / "dst", data, SMALL, work=work)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_force_replaces_the_checkpoint_and_continues_the_run(
    source: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    dst, log = tmp_path / "dst", tmp_path / "dst.training" / "metrics.csv"
    assert run(source, dst, "--data", data, *OPTIONS) == 0
    trained, lines = load_weights(dst), log.read_text()
    capsys.readouterr()
    assert run(source, dst, "--data", data, *OPTIONS, "--keep-teacher") == 1
    assert "add --force to replace it" in capsys.readouterr().err
    assert run(source, dst, "--data", data, *OPTIONS, "--keep-teacher", "--force") == 0
    written = load_weights(dst)
    assert written.keys() > trained.keys() and log.read_text() == lines
    assert all(torch.equal(written[name], tensor) for name, tensor in trained.items())
    capsys.readouterr()
    assert run(source, dst, "--data", data, *OPTIONS, "--lr", "1e-3", "--force") == 1
    assert "or another --work to start a new one" in capsys.readouterr().err
    assert load_weights(dst).keys() == written.keys()
    assert run(source, source, "--data", data, *OPTIONS, "--force") == 1
    assert "which is read; choose another output directory" in capsys.readouterr().err


def test_force_replaces_nothing_else_that_came_meanwhile(
    source: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dst = make_checkpoint(tmp_path / "dst")
    inside = shutil.copy(data, dst / "data.jsonl")
    with pytest.raises(KvforgeError, match=r"holds .*data\.jsonl, which is read"):
        distill_checkpoint(source, dst, inside, SMALL, overwrite=True)

    def come(*paths: Path) -> None:
        shutil.rmtree(dst)
        dst.mkdir()
        (dst / "notes.txt").write_text("kept")

    monkeypatch.setattr("kvforge.distill.run.plot_metrics", come)
    with pytest.raises(KvforgeError, match="dst is there and not empty"):
        distill_checkpoint(source, dst, data, SMALL, overwrite=True)
    assert (dst / "notes.txt").read_text() == "kept"


def test_an_empty_working_directory_is_written_to(source: Path, data: Path, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    summary = distill_checkpoint(source, ".", data, SMALL)
    assert Path(summary.work) == tmp_path / "empty.training"
    assert (tmp_path / "empty" / "config.json").is_file()


def test_help_says_the_defaults() -> None:
    subparsers = next(action for action in make_parser()._actions if action.choices)
    options = {action.dest: action for action in subparsers.choices["distill"]._actions}
    for field in dataclasses.fields(DistillConfig):
        if field.name not in ("betas", "early_exit", "max_steps"):
            assert options[field.name].help.endswith(f"(default: {field.default})"), field.name
