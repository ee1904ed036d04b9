"""`kvforge quantize` with NVIDIA's ModelOpt itself: what it writes, and that kvforge reads it."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvforge.checkpoint import Quantization, kv_scales, open_checkpoint
from kvforge.checkpoint.model import open_model
from kvforge.cli import main
from kvforge.common.errors import CheckpointError, KvforgeError
from kvforge.quantize import quantize_checkpoint
from kvforge.quantize.swiftkv_model import load_swiftkv
from model_defs import load_config
from model_defs.reference import reference_logits
from model_defs.weights import weight_specs
from tests.support.full_disk import run_with_file_limit
from tests.support.models.checkpoints import FAMILIES, MAMBA, load_weights, make_checkpoint
from tests.support.rounding import assert_near, assert_within, model_error, roundings_error

ASSETS = Path(__file__).resolve().parents[3] / "model_defs" / "assets"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_calibrated_module_is_the_model(family: str, tmp_path: Path) -> None:
    """Logits of the module that is calibrated equal the definition, cut, ragged groups, biases and norms included."""
    sliding = {"sliding_window": 8} if family == "mistral" else {}
    path = make_checkpoint(tmp_path / "c", family, cut=2, group_size=2, num_hidden_layers=5, **sliding)
    checkpoint = open_model(path)
    config = load_config(checkpoint.hf_config)
    ids = torch.arange(3, 30)
    logits = load_swiftkv(checkpoint, config, torch.float32)(ids[None])[0]
    assert_near(logits, reference_logits(config, load_weights(path), ids), model_error(config, len(ids)))


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """fp8 exports of the tiny teacher (through transformers) and of its student (our module)."""
    pytest.importorskip("modelopt", reason="nvidia-modelopt is not installed")
    folder = tmp_path_factory.mktemp("modelopt")
    for name in ("tiny-teacher", "tiny-swiftkv"):
        quantize_checkpoint(ASSETS / name, folder / name, "fp8", num_samples=5, num_tokens=256)
    return {name: folder / name for name in ("tiny-teacher", "tiny-swiftkv")}


@pytest.mark.parametrize("name", ["tiny-teacher", "tiny-swiftkv"])
def test_an_export_is_read_back_within_fp8_of_the_original(name: str, exports: dict[str, Path]) -> None:
    """|x - q(x)| is at most half a step: 2^-4 of x, or half the smallest subnormal times the scale. ModelOpt divides in
    the model's bf16, which adds up to 2^-8 of x."""
    checkpoint, original = open_checkpoint(exports[name]), load_file(ASSETS / name / "model.safetensors")
    assert checkpoint.quantization == Quantization("FP8", "FP8")
    stored = load_file(exports[name] / "model.safetensors")
    fp8 = [key for key in original if stored[key].dtype == torch.float8_e4m3fn]
    assert len(fp8) == sum(key.endswith("proj.weight") or "proj_swiftkv" in key for key in original)
    for key, tensor in original.items():
        read = checkpoint.read(key, tuple(tensor.shape))
        if key not in fp8:
            assert torch.equal(read, tensor), key
            continue
        scale = stored[f"{key}_scale"]
        assert scale == tensor.float().abs().max() / 448, key
        error, size = (read - tensor.float()).abs(), tensor.float().abs()
        assert bool((error <= size * 2**-8 + torch.maximum(size * 2**-4, scale * 2**-10)).all()), key


def test_both_ways_to_calibrate_agree_below_the_cut(exports: dict[str, Path]) -> None:
    """The student's lower layers are the teacher's: transformers' model and our module must see the same maxima."""
    scales = {}
    for name, path in exports.items():
        checkpoint = open_checkpoint(path)
        config = load_config(checkpoint.hf_config)
        scales[name] = kv_scales(checkpoint, config)
        assert len(scales[name]) == len(config.owners)
        assert all(0.001 < value < 1 for pair in scales[name] for value in pair)
    torch.testing.assert_close(
        torch.tensor(scales["tiny-swiftkv"][:4]),
        torch.tensor(scales["tiny-teacher"][:4]),
        rtol=roundings_error(14 * 4, torch.bfloat16),
        atol=0,
    )


@pytest.mark.parametrize(
    ("family", "sizes"), [("granitemoe", {}), ("granitemoehybrid", MAMBA | {"num_local_experts": 4})]
)
def test_experts_are_read_back_where_a_family_stores_them_as_one(
    family: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    """ModelOpt writes them one by one."""
    pytest.importorskip("modelopt", reason="nvidia-modelopt is not installed")
    source = make_checkpoint(tmp_path / "source", family, **sizes)
    quantize_checkpoint(source, tmp_path / "out", "fp8", num_samples=2, num_tokens=256)
    original, written = open_model(source), open_model(tmp_path / "out")
    for spec in weight_specs(load_config(original.hf_config)):
        for name, shape in ((each.name, each.shape) for each in spec.sources if ".experts." in each.name):
            wanted = original.read(name, shape)
            assert_within(written.read(name, shape), wanted, wanted.abs().max() * 2**-4)


def test_an_export_that_no_engine_reads_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("modelopt", reason="nvidia-modelopt is not installed")
    source = make_checkpoint(tmp_path / "source", "gpt_oss")
    with pytest.raises(CheckpointError, match=r"no engine can be built of it .*_proj\.weight.*Give another --recipe"):
        quantize_checkpoint(source, tmp_path / "out", "fp8", num_samples=2, num_tokens=256)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(("family", "cut"), [("mistral", None), ("qwen2", None), ("qwen3", 2)])
def test_fp8_kv_leaves_the_weights_alone(family: str, cut: int | None, tmp_path: Path) -> None:
    pytest.importorskip("modelopt", reason="nvidia-modelopt is not installed")
    source = make_checkpoint(tmp_path / "source", family, cut=cut, dtype=torch.bfloat16)
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 40)
    summary = quantize_checkpoint(source, tmp_path / "out", "fp8-kv", calibration=text, num_samples=3, num_tokens=64)
    assert summary.num_samples == 3 and summary.num_tokens == 192 and len(summary.kv_scales) == 4
    original, written = load_weights(source), load_weights(tmp_path / "out")
    for name, tensor in original.items():
        assert torch.equal(written[name], tensor), name
    assert len(written) == len(original) + 8
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1  # who reads one file reads all
    assert open_checkpoint(tmp_path / "out").quantization == Quantization(None, "FP8")


def test_the_command_refuses_in_one_sentence_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = make_checkpoint(tmp_path / "source", "llama"), tmp_path / "out"
    base = ["quantize", str(source), "-o", str(output), "--recipe"]
    short = tmp_path / "short.txt"
    short.write_text("too short")
    for arguments, message in (
        ([*base, "int3"], "Recipe 'int3' is unknown; choose from fp8, fp8-kv, int4."),
        ([*base, "fp8", "--num-samples", "0"], "--num-samples must be at least 1"),
        ([*base, "fp8", "--calibration", str(short)], "give a longer text"),
        ([*base, "fp8", "--calibration", str(tmp_path / "none")], "cannot be read as UTF-8"),
        (["quantize", str(tmp_path / "none"), "-o", str(output), "--recipe", "fp8"], "does not exist: give"),
        (["quantize", str(source), "-o", str(source), "--recipe", "fp8"], "choose another output directory"),
    ):
        assert main(arguments) == 1
        assert message in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "modelopt.torch.quantization", None)
    assert main([*base, "fp8", "--num-tokens", "256"]) == 1
    assert "pip install -e '.[modelopt]'" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["short.txt", "source"]


def test_a_quantized_or_unknown_checkpoint_is_refused(exports: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is quantized already"):
        quantize_checkpoint(exports["tiny-teacher"], tmp_path / "out", "fp8")
    source = make_checkpoint(tmp_path / "source", "llama")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    with pytest.raises(CheckpointError, match="model_type 'gpt2' is not supported"):
        quantize_checkpoint(source, tmp_path / "out", "fp8")


K = "model.layers.0.self_attn.k_proj.weight"
DAMAGE: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "a tensor is missing": (lambda w: w.pop(K), f"Tensor {K} is missing"),
    "a bias that nothing asks for": (lambda w: w.update({K.replace("weight", "bias"): torch.ones(32)}), "does not ask"),
    "a NaN": (lambda w: w[K].fill_(torch.nan), f"Tensor {K} in"),
    "too large to calibrate": (lambda w: w[K].fill_(3e38), "met numbers that are not finite"),
    "keys of zero": (lambda w: w[K].zero_(), "k_proj.*scale of .*source would not be a positive number"),
    "a matrix of zeros": (lambda w: w["model.layers.1.mlp.up_proj.weight"].zero_(), "1.mlp.* would not be a positive"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_weights_are_not_quantized(damage: str, tmp_path: Path) -> None:
    """transformers draws random numbers for weights that are missing and leaves out those it does not know."""
    pytest.importorskip("modelopt", reason="nvidia-modelopt is not installed")
    source = make_checkpoint(tmp_path / "source", "llama", num_hidden_layers=2)
    weights = load_file(source / "model.safetensors")
    change, message = DAMAGE[damage]
    change(weights)
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        quantize_checkpoint(source, tmp_path / "out", "fp8", num_samples=1, num_tokens=256)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_tokenizer_that_does_not_fit_is_named(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "llama", vocab_size=100)  # the tokenizer knows all bytes
    text = tmp_path / "text.txt"
    text.write_text("zebra " * 40)
    with pytest.raises(CheckpointError, match=f"gives token {ord('z') + 3}, but the model has 100"):
        quantize_checkpoint(source, tmp_path / "out", "fp8", calibration=text, num_tokens=16)
    (source / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not a readable tokenizer"):
        quantize_checkpoint(source, tmp_path / "out", "fp8", calibration=text)


def test_a_full_disk_leaves_one_sentence_and_nothing_else(tmp_path: Path) -> None:
    """A limit on the size of files stands for the full disk: too small for the weights, in a process of its own."""
    pytest.importorskip("modelopt", reason="nvidia-modelopt is not installed")
    source = make_checkpoint(tmp_path / "source", "llama", num_hidden_layers=2, vocab_size=2000)
    command = ["quantize", str(source), "-o", str(tmp_path / "out"), "--recipe", "fp8-kv"]
    result = run_with_file_limit(200_000, *command, "--num-samples", "1", "--num-tokens", "256")
    assert result.returncode == 1, result.stderr
    assert f"kvforge: error: {tmp_path / 'out'} was not written" in result.stderr and "Traceback" not in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_failure_in_the_middle_leaves_nothing(tmp_path: Path) -> None:
    pytest.importorskip("modelopt", reason="nvidia-modelopt is not installed")
    source = make_checkpoint(tmp_path / "source", "llama", cut=2)

    def fail(done: int, total: int) -> None:
        raise KvforgeError(f"stopped at {done} of {total}")

    with pytest.raises(KvforgeError, match="stopped at 0 of 2"):
        quantize_checkpoint(source, tmp_path / "out", "fp8", num_samples=2, num_tokens=256, progress=fail)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
