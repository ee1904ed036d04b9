"""Training a predictor: its start, its loss, its continuation, its checkpoint, and what it refuses."""

import csv
import json
import random
import shutil
import string
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvforge.cli import main
from kvforge.common.errors import CheckpointError, KvforgeError
from kvforge.common.exact_intervals import ExactTokens
from kvforge.distill import DistillConfig
from kvforge.distill.packing import DataSettings
from kvforge.prediction.config import PredictConfig
from kvforge.prediction.load import load_pair
from kvforge.prediction.predicted_generation import generate
from kvforge.prediction.ridge import fit_maps
from kvforge.prediction.run import FitOptions, train_predictor
from kvforge.prediction.train import train
from kvforge.prediction.trainee import SUMS, Trainee
from kvforge.swiftkv import make_layout
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.distillation import random_data
from tests.support.models.prediction import own_predictor, random_predictor

LOOP = DistillConfig(dtype="fp32", device="cpu", max_steps=6, batch_size=4, micro_batch=3, lr=3e-3, checkpoint_every=2)
CONFIG = PredictConfig(LOOP)
ROUNDING = 1e-3
"""Of float32 sums over two sequences, a hundred layers' tokens and ten thousand scores, relative or of numbers near 1:
what a prediction that is off, or a term that is left out, changes is a hundred times as much."""
UNEXPLAINED = 1e-4
"""What ridge regression with a regulariser of 1e-9 leaves of targets that are linear in its inputs, where eigenvalues
of the inputs' covariance are spread over four orders of magnitude; nothing else leaves less than a hundredth."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("predict") / "base")


@pytest.fixture(scope="module")
def predictor(base: Path) -> Path:
    options = {"layers": (0, 0, 1, 1), "num_hidden_layers": 3, "hidden_size": 32, "head_dim": 8}
    return random_predictor(base.parent / "predictor", base, **options)


@pytest.mark.parametrize("exact_targets", [False, True])
def test_a_perfect_predictor_has_no_loss(base: Path, tmp_path: Path, exact_targets: bool) -> None:
    pair = load_pair(base, own_predictor(base, tmp_path / "own"), torch.float32)
    data = random_data()
    with torch.no_grad():
        sums = Trainee(*pair, PredictConfig(LOOP, exact_targets=exact_targets))(data.batch(range(4)))
    found = dict(zip(SUMS, sums.tolist(), strict=True))
    weight = float(data.batch(range(4)).weight.sum())
    assert found["agreement"] == pytest.approx(weight, rel=ROUNDING)
    assert all(abs(found[name]) < ROUNDING for name in ("kl", "k", "v", "qk"))


@torch.no_grad()
def test_sums_are_those_of_whole_samples(base: Path, predictor: Path) -> None:
    """Of one sample in a sequence of its own, from logits and caches of the plain models."""
    pair = load_pair(base, predictor, torch.float32)
    trainee = Trainee(*pair, PredictConfig(LOOP, num_queries=1000))
    data = random_data()
    batch = data.batch([0])
    sums = dict(zip(SUMS, trainee(batch).tolist(), strict=True))
    own, qk, k_off, v_off = pair[0], 0.0, 0.0, 0.0
    for segment in range(int(batch.segments.max()) + 1):
        rows = batch.segments[0] == segment
        if not batch.weight[0, rows].any():
            continue
        ids, layout = batch.input_ids[:, rows], make_layout(own.sizes, int(rows.sum()))
        inputs = pair[1].inputs(ids, make_layout(pair[1].prediction.auxiliary, int(rows.sum())))
        predicted, hidden = pair[1].predict(inputs, own, layout), own.model.embed(ids)
        for index, layer in enumerate(own.model.layers):
            x = layer.input_layernorm(hidden)
            k, v = layer.self_attn.key_value(x, layout)
            q = layer.self_attn.query(x, layout)
            off = predicted[index][0] - k
            k_off += off.abs().mean((-1, -2)).sum() / 4
            v_off += (predicted[index][1] - v).abs().mean((-1, -2)).sum() / 4
            for head in range(4):
                scores = q[0, :, head] @ off[0, :, head // 2].T / 4
                for row in range(len(scores)):
                    qk += scores[row, : row + 1].square().mean() / 16
            hidden = layer(hidden, (k, v), layout)
    for name, want in (("k", k_off), ("v", v_off), ("qk", qk)):
        assert sums[name] == pytest.approx(float(want), rel=ROUNDING)


def test_score_errors_reach_the_maps(base: Path, predictor: Path) -> None:
    pair = load_pair(base, predictor, torch.float32)
    sums = Trainee(*pair, CONFIG)(random_data().batch([0, 1]))
    sums[SUMS.index("qk")].backward()
    maps = pair[1].kv_prediction["3"]
    assert maps.k_proj.weight.grad.abs().max() > 0 and not maps.v_proj.weight.grad.any()
    assert pair[0].model.layers[0].self_attn.k_proj.weight.grad is None


def test_micro_batches_add_up(base: Path, predictor: Path, tmp_path: Path) -> None:
    rows = []
    for size in (1, 4):
        loop = DistillConfig(**{**vars(LOOP), "micro_batch": size, "max_steps": 2})
        pair = load_pair(base, predictor, torch.float32)
        rows.append(train(PredictConfig(loop), *pair, random_data(), tmp_path / str(size)).metrics)
    for name in ("loss", "kl", "k", "v", "grad_norm"):
        assert rows[0][name] == pytest.approx(rows[1][name], rel=ROUNDING)


@pytest.mark.parametrize("part", ["maps", "all"])
def test_resumed_equals_uninterrupted(base: Path, predictor: Path, tmp_path: Path, part: str) -> None:
    config, data = PredictConfig(LOOP, train=part), random_data()
    pairs = [load_pair(base, predictor, torch.float32) for _ in range(3)]
    start = {name: tensor.clone() for name, tensor in pairs[0][1].state_dict().items()}
    train(config, *pairs[0], data, tmp_path / "whole")
    train(config, *pairs[1], data, tmp_path / "parts", stop_after=3)
    progress = train(config, *pairs[2], data, tmp_path / "parts")
    whole, parts = (pair[1].state_dict() for pair in (pairs[0], pairs[2]))
    assert progress.step == 6 and all(torch.equal(whole[name], parts[name]) for name in whole)
    changed = {name for name in whole if not torch.equal(whole[name], start[name])}
    assert all(name.startswith("kv_prediction.") for name in changed) == (part == "maps")
    assert ("model.layers.0.mlp.up_proj.weight" in changed) == (part == "all")
    assert not any(name.startswith(("model.layers.1.mlp", "model.layers.2.", "lm_head")) for name in changed)
    with (tmp_path / "parts" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [1, 2, 3, 4, 5, 6]
    with pytest.raises(KvforgeError, match="another --work"):
        train(PredictConfig(LOOP, train=part, qk_weight=2.0), *pairs[1], data, tmp_path / "parts")


def test_training_brings_the_cache_nearer(base: Path, predictor: Path, tmp_path: Path) -> None:
    rows = []
    loop = DistillConfig(**{**vars(LOOP), "max_steps": 25, "schedule": "constant"})
    train(PredictConfig(loop), *load_pair(base, predictor, torch.float32), random_data(), tmp_path, on_step=rows.append)
    assert all(rows[-1][name] < 0.9 * rows[0][name] for name in ("loss", "k", "v"))


def test_the_ridge_start_is_exact_where_it_can_be(base: Path, tmp_path: Path) -> None:
    """An auxiliary model that is the base: every owner's K and V are linear in what its map reads."""
    letters = random.Random(0).choices(string.printable[:95], k=9000)  # more than a hidden state has numbers
    (tmp_path / "text.txt").write_text("".join(letters))
    fit = FitOptions(ridge=1e-9, num_samples=16, calibration=tmp_path / "text.txt")
    summary = train_predictor(base, base, tmp_path / "p", None, CONFIG, fit=fit)
    assert summary.layers == (0, 1, 2, 3) and summary.steps == 0
    assert all(fit.k < UNEXPLAINED and fit.v < UNEXPLAINED for fit in summary.fits)
    pair = load_pair(base, tmp_path / "p", torch.float32)
    prompt = [3 + 32 + 5 * index % 90 for index in range(60)]
    assert generate(*pair, prompt, 5) == generate(*pair, prompt, 5, ExactTokens(60))


def test_the_command_writes_what_it_trained(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    rows = [{"prompt": "abcdefgh " * index, "completion": " ijkl"} for index in range(2, 12)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["predict", "truncate", str(base), "-o", str(tmp_path / "aux"), "--layers", "2"]) == 0
    options = "--mask answers --max-steps 2 --batch-size 2 --length 64 --dtype fp32 --num-samples 4 --num-tokens 128 -q"
    given = [str(base), str(tmp_path / "aux"), "-o", str(tmp_path / "p"), "--data", str(tmp_path / "data.jsonl")]
    assert main(["predict", "train", *given, *options.split()]) == 0
    assert "2 steps" in capsys.readouterr().out
    config = json.loads((tmp_path / "p" / "config.json").read_text())
    assert config["kv_prediction"]["layers"] == [0, 0, 1, 1] and config["num_hidden_layers"] == 2
    assert (tmp_path / "p" / "tokenizer.json").is_file()
    own, tensors = load_pair(base, tmp_path / "p", torch.float32), load_file(tmp_path / "p" / "model.safetensors")
    assert generate(*own, [5, 6, 7], 3) and tensors["kv_prediction.3.v_proj.bias"].shape == (32,)
    assert main(["predict", "train", *given, *options.split()]) == 1
    assert "is there and not empty" in capsys.readouterr().err
    (tmp_path / "p" / "old.txt").touch()
    assert main(["predict", "train", *given, *options.split(), "--force"]) == 0
    again = load_file(tmp_path / "p" / "model.safetensors")
    assert not (tmp_path / "p" / "old.txt").exists()
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())  # of the run that was done
    for force, code in (([], 1), (["--force"], 0)):
        aux = ["predict", "truncate", str(base), "-o", str(tmp_path / "aux"), "--layers", "1", *force]
        assert main(aux) == code
    assert json.loads((tmp_path / "aux" / "config.json").read_text())["num_hidden_layers"] == 1


def test_a_run_continues_over_a_fit_that_is_rounded_otherwise(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on another number of threads."""
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": "ab " * index, "completion": " cd"}) + "\n" for index in range(9)))
    config = PredictConfig(DistillConfig(dtype="fp32", device="cpu", max_steps=1, batch_size=2, length=64))

    def written(overwrite: bool, ridge: float = 1e-3) -> dict[str, torch.Tensor]:
        fit, settings = FitOptions(ridge, num_samples=4, num_tokens=64), DataSettings(64)
        given = base, base, tmp_path / "p", data, config, settings, fit
        train_predictor(*given, overwrite=overwrite, progress=False)
        return load_file(tmp_path / "p" / "model.safetensors")

    def otherwise(*args, **kwargs):
        fits, maps = fit_maps(*args, **kwargs)
        return fits, {name: tensor * (1 + 2**-22) for name, tensor in maps.items()}

    first = written(overwrite=False)
    monkeypatch.setattr("kvforge.prediction.run.fit_maps", otherwise)
    again = written(overwrite=True)
    assert all(torch.equal(again[name], tensor) for name, tensor in first.items())
    with pytest.raises(KvforgeError, match="another --work"):
        written(overwrite=True, ridge=1e-2)


def test_what_does_not_go_together_is_refused(base: Path, tmp_path: Path) -> None:
    def refused(auxiliary: Path, match: str, **options) -> None:
        with pytest.raises(KvforgeError, match=match):
            train_predictor(base, auxiliary, tmp_path / "out", None, CONFIG, **options)
        assert not (tmp_path / "out").exists()

    refused(base, "is in .*out; choose another directory", work=tmp_path / "out" / "work")
    refused(base, "--work .* is .*; choose another directory", work=base)
    with pytest.raises(KvforgeError, match=r"holds .*tokenizer\.json, which is read"):
        train_predictor(base, base, make_checkpoint(tmp_path / "old"), tmp_path / "old" / "tokenizer.json", CONFIG)
    refused(make_checkpoint(tmp_path / "vocab", vocab_size=300), "300 tokens and the base 320")
    refused(base, "4 owners", layers=(0, 1))
    refused(base, "layers 0 to 3", layers=(0, 1, 2, 4))
    refused(base, "embedding alone; choose --layers", layers=(0, 0, 0, 0))  # as no engine could be built with these
    refused(make_checkpoint(tmp_path / "scale", "gemma3_text"), "attends with the usual scale; choose another")
    refused(make_checkpoint(tmp_path / "cut", cut=2), "SwiftKV checkpoint already")
    latent = make_checkpoint(tmp_path / "latent", "deepseek_v2")
    refused(latent, "as the auxiliary, and this one has latents")
    with pytest.raises(CheckpointError, match="as the base, and this one has latents"):
        train_predictor(latent, base, tmp_path / "out", None, CONFIG)
    other = shutil.copytree(base, tmp_path / "other")
    text = (other / "tokenizer.json").read_text().replace('"t260"', '"zzz"')
    (other / "tokenizer.json").write_text(text)
    refused(other, "another tokenizer")
    content = json.loads((base / "tokenizer.json").read_text())
    content["added_tokens"] = [*content["added_tokens"], {"id": 319, "content": "<other>"}]
    (other / "tokenizer.json").write_text(json.dumps(content))
    refused(other, "another tokenizer")
    weights = load_file(base / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][0] = torch.nan
    broken = shutil.copytree(base, tmp_path / "broken")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="holds nan"):
        train_predictor(base, broken, tmp_path / "out", None, CONFIG)
    for options, match in (({"train": "some"}, "maps, all"), ({"qk_weight": -1.0}, "--qk-weight")):
        with pytest.raises(KvforgeError, match=match):
            PredictConfig(**options)
    with pytest.raises(KvforgeError, match="--ridge"):
        FitOptions(ridge=0.0)
