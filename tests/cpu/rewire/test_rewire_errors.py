"""What ``kvforge rewire`` refuses: one sentence, nothing written."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvforge.cli import main, make_parser
from kvforge.rewire import RewireOptions, convert
from tests.support.full_disk import run_with_file_limit
from tests.support.models.checkpoints import load_weights, make_checkpoint


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("rewire") / "source", "llama")


def refused(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: object) -> str:
    before = sorted(path.relative_to(folder) for path in folder.rglob("*"))
    assert main(["rewire", *map(str, arguments)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("kvforge: error: ") and error.count("\n") == 1 and error.endswith(".\n")
    assert sorted(path.relative_to(folder) for path in folder.rglob("*")) == before
    return error


def test_help_says_the_defaults_of_the_options() -> None:
    args = make_parser().parse_args(["rewire", "SRC", "DST", "--cut-layer", "auto"])
    for field in dataclasses.fields(RewireOptions):
        default = None if field.name == "cut" else field.default
        assert getattr(args, field.name) == default, field.name
    subparsers = next(action for action in make_parser()._actions if action.choices)
    parser = subparsers.choices["rewire"]
    shown = {action.dest: parser._get_formatter()._expand_help(action) for action in parser._actions}
    for name in ("group_size", "init", "num_samples", "num_tokens", "quality_budget", "ridge"):
        assert shown[name].endswith(f"(default: {getattr(args, name)})"), name


def test_options(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out"
    short = tmp_path / "short.txt"
    short.write_text("too short")
    single = tmp_path / "single.txt"
    single.write_text("x" * 600)
    for arguments, message in (
        (["--cut-layer", 0], "--cut-layer is 0; a model of 4 layers can be cut at 1 to 3."),
        (["--cut-layer", 4], "--cut-layer is 4; a model of 4 layers can be cut at 1 to 3."),
        (["--cut-layer", 2, "--group-size", 0], "--group-size is 0"),
        (
            ["--cut-layer", 2, "--init", "zero"],
            "--init 'zero' is unknown; choose from copy, mean, fold, ridge, minicache.",
        ),
        (["--cut-layer", "auto", "--quality-budget", 0], "--quality-budget is 0; give a positive number."),
        (["--cut-layer", "auto", "--quality-budget", "nan"], "--quality-budget is nan; give a positive number."),
        (["--cut-layer", 2, "--ridge", 0], "--ridge is 0"),
        (["--cut-layer", 2, "--num-samples", 1], "--num-samples must be at least 2"),
        (["--cut-layer", 2, "--init", "ridge", "--calibration", short], "give a longer text"),
        (["--cut-layer", 2, "--init", "ridge", "--calibration", single], "has one sample of 512 tokens"),
        (["--cut-layer", 2, "--init", "ridge", "--calibration", tmp_path / "none"], "cannot be read as UTF-8"),
        (["--cut-layer", 2, "--plot", tmp_path / "a.txt"], "name a .png, .svg or .pdf."),
        (["--cut-layer", 2, "--plot", tmp_path / "none" / "a.png"], "there is no directory"),
    ):
        assert message in refused(capsys, tmp_path, source, output, *arguments)
    for arguments in (["--cut-layer", "half"], ["--cut-layer", "2", "--max-shard-size", "5MG"]):
        with pytest.raises(SystemExit):
            main(["rewire", str(source), str(output), *arguments])
        assert "invalid" in capsys.readouterr().err


def test_outputs(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for force in ((), ("--force",)):
        assert "is or holds" in refused(capsys, source, source, source, "--cut-layer", 2, *force)
    file = tmp_path / "file"
    file.write_text("kept")
    assert "is there and not empty" in refused(capsys, tmp_path, source, file, "--cut-layer", 2)
    assert "its parent is a file" in refused(capsys, tmp_path, source, file / "out", "--cut-layer", 2)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert main(["rewire", str(source), str(empty), "--cut-layer", "2"]) == 0
    assert (empty / "config.json").is_file()


def test_force_replaces_a_checkpoint_and_nothing_else(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, cut_at = tmp_path / "out", lambda: json.loads((tmp_path / "out/config.json").read_text())
    assert main(["rewire", str(source), str(output), "--cut-layer", "2"]) == 0
    (output / "old.txt").touch()
    capsys.readouterr()
    assert "add --force to replace it" in refused(capsys, tmp_path, source, output, "--cut-layer", 3)
    assert "can be cut at" in refused(capsys, tmp_path, source, output, "--cut-layer", 4, "--force")
    text = ("--calibration", output / "old.txt")
    assert "old.txt, which is read" in refused(capsys, tmp_path, source, output, "--cut-layer", 3, "--force", *text)
    assert cut_at()["num_key_value_layers"] == 2
    assert main(["rewire", str(source), str(output), "--cut-layer", "3", "--force"]) == 0
    assert cut_at()["num_key_value_layers"] == 3 and not (output / "old.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "config.json").write_text("{}")
    capsys.readouterr()
    assert "is there and not empty" in refused(capsys, tmp_path, source, notes, "--cut-layer", 2, "--force")


def test_sources(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewired = make_checkpoint(tmp_path / "rewired", "llama", cut=2)
    quantized = make_checkpoint(tmp_path / "quantized", "llama")
    config = json.loads((quantized / "config.json").read_text())
    scheme = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    (quantized / "config.json").write_text(json.dumps(config | {"quantization_config": scheme}))
    missing = make_checkpoint(tmp_path / "missing", "llama")
    weights = load_weights(missing)
    del weights["model.layers.3.self_attn.k_proj.weight"]
    save_file(weights, missing / "model.safetensors")
    stray = make_checkpoint(tmp_path / "stray", "llama")
    save_file(load_weights(stray) | {"lm_head_early_exit.weight": torch.ones(320, 64)}, stray / "model.safetensors")
    other = make_checkpoint(tmp_path / "other", "llama")
    (other / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    single = make_checkpoint(tmp_path / "single", "llama", num_hidden_layers=1)
    damaged = make_checkpoint(tmp_path / "damaged", "llama")
    weights = load_weights(damaged)
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.nan
    save_file(weights, damaged / "model.safetensors")
    large = make_checkpoint(tmp_path / "large", "llama")
    weights["model.layers.1.mlp.up_proj.weight"].fill_(3e38)
    save_file(weights, large / "model.safetensors")
    text = tmp_path / "text.txt"
    text.write_text("words " * 200)
    ridge = ["--init", "ridge", "--calibration", text, "--num-tokens", 64]
    capsys.readouterr()  # what writing the checkpoints printed
    for path, message, *more in (
        (tmp_path / "none", "does not exist: give a directory"),
        (rewired, "is a SwiftKV checkpoint already; rewire the model it was made from."),
        (stray, "is a SwiftKV checkpoint already; rewire the model it was made from."),
        (quantized, "is quantized"),
        (missing, "Tensor model.layers.3.self_attn.k_proj.weight is missing"),
        (other, "model_type 'gpt2' is not supported"),
        (single, "has one layer, and a cut needs two."),
        (damaged, "Tensor model.layers.1.mlp.up_proj.weight", *ridge),
        (large, "not finite entering layer 2; the weights are damaged.", *ridge),
    ):
        cut = "1" if path == single else "2"
        assert message in refused(capsys, tmp_path, path, tmp_path / "out", "--cut-layer", cut, *more)


@pytest.mark.parametrize(
    "options",
    [("--cut-layer", 2, "--init", "fold"), ("--cut-layer", 2, "--init", "ridge"), ("--cut-layer", "auto")],
)
def test_damaged_projections_above_the_cut(options: tuple, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Running the source does not show them: nothing reads what leaves the last layer."""
    path = make_checkpoint(tmp_path / "damaged", "llama")
    weights = load_weights(path)
    weights["model.layers.3.self_attn.k_proj.weight"][5, 5] = torch.nan
    save_file(weights, path / "model.safetensors")
    text = tmp_path / "text.txt"
    text.write_text("words " * 200)
    capsys.readouterr()
    calibration = ["--calibration", text, "--num-tokens", 64, "--json"]
    error = refused(capsys, tmp_path, path, tmp_path / "out", *options, *calibration)
    assert "Tensor model.layers.3.self_attn.k_proj.weight" in error and "holds nan as float32" in error


def test_a_fold_that_float16_cannot_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_checkpoint(tmp_path / "wide", "llama", dtype=torch.float16)
    weights = load_weights(path)
    weights["model.layers.3.self_attn.k_proj.weight"][5, 5] = 6e4
    weights["model.layers.3.input_layernorm.weight"][5] = 2
    save_file(weights, path / "model.safetensors")
    capsys.readouterr()
    assert "is not finite in float16" in refused(capsys, tmp_path, path, tmp_path / "out", "--cut-layer", 2)
    assert main(["rewire", str(path), str(tmp_path / "out"), "--cut-layer", "2", "--init", "mean"]) == 0


@pytest.mark.parametrize(("limit", "init"), [(100_000, "fold"), (20_000, "ridge")])
def test_a_full_disk(source: Path, tmp_path: Path, limit: int, init: str) -> None:
    """A limit on the size of files stands for it: too small for the weights, or for the calibration's inputs."""
    text = tmp_path / "text.txt"
    text.write_text("words " * 400)
    command = ["rewire", str(source), str(tmp_path / "out"), "--cut-layer", "2"]
    result = run_with_file_limit(limit, *command, "--init", init, "--calibration", str(text))
    assert result.returncode == 1, result.stderr
    assert result.stderr.startswith(f"kvforge: error: {tmp_path / 'out'} was not written")
    assert "free space" in result.stderr
    assert result.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_a_full_gpu(source: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    text = tmp_path / "text.txt"
    text.write_text("words " * 400)
    monkeypatch.setattr(convert, "record_inputs", fail)
    options = ["--cut-layer", 2, "--init", "ridge", "--calibration", text]
    assert "CUDA_VISIBLE_DEVICES= to calibrate" in refused(capsys, tmp_path, source, tmp_path / "out", *options)


def test_a_failure_in_the_middle_leaves_nothing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(convert, "write_config", fail)
    assert main(["rewire", str(source), str(tmp_path / "out"), "--cut-layer", "2"]) == 130
    assert not list(tmp_path.iterdir())
